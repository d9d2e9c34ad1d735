"""What a supervisor counts, in Prometheus' text format; ``docs/metrics.md`` lists it. Without a client library."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from aotgaudi.wrap.watch.findings import Finding, Phase, What

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge"]
_PHASES: tuple[Phase, ...] = ("load", "exercise", "live")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its type, what it means, and its labels."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "aotgaudi_guest_warm": Family(
            "gauge", "1 while nothing speaks against it that the guest runs from sealed code alone."
        ),
        "aotgaudi_guest_ready": Family("gauge", "1 while GET /ready answers 200."),
        "aotgaudi_compilations_total": Family(
            "counter", "What a warm guest does not do, by the phase and what it was.", ("phase", "what")
        ),
        "aotgaudi_guest_artifacts": Family("gauge", "Artifacts that the guest loads.", ("state",)),
        "aotgaudi_cache_files_added_total": Family("counter", "Files that appeared in the guest's caches."),
        "aotgaudi_verify_seconds": Family(
            "gauge", "From the process's start until bundle and launch were compared."
        ),
        "aotgaudi_restore_seconds": Family("gauge", "Restoring the sealed files, hashing them on the way."),
        "aotgaudi_guest_ready_seconds": Family("gauge", "From the guest's start until it was ready."),
        "aotgaudi_witness_processes": Family(
            "gauge", "The guest's processes, by whether a witness is in them.", ("state",)
        ),
        "aotgaudi_capture_info": Family(
            "gauge", "1; the labels say what is served.", ("launch", "bundle", "epoch")
        ),
        "aotgaudi_guest_residuals": Family(
            "gauge", "What no cache can hold, and every start of this guest does again."
        ),
    }
)
"""Every metric, in the order in which they are exposed."""


class Metrics:
    """The values. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._findings: Counter[tuple[str, str]] = Counter()
        for name, family in FAMILIES.items():
            if not family.labels:
                self._values[name, ()] = 0.0
        for phase in _PHASES:
            for what in get_args(What):
                self._findings[phase, what] = 0

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge. Raises KeyError for a metric that is not listed, ValueError for labels that are not its."""
        if len(labels) != len(FAMILIES[name].labels):
            raise ValueError(f"{name} has the labels {FAMILIES[name].labels}")
        with self._lock:
            self._values[name, labels] = float(value)

    def get(self, name: str, *labels: str) -> float:
        """Returns a value; 0 for what was never set."""
        with self._lock:
            return self._values.get((name, labels), 0.0)

    def count(self, findings: Iterable[Finding]) -> None:
        """Counts findings, but for those of a cold phase."""
        with self._lock:
            self._findings.update((f.phase, f.what) for f in findings if f.phase in _PHASES)

    def count_files(self, number: int) -> None:
        """Counts files that appeared in the caches."""
        with self._lock:
            self._values["aotgaudi_cache_files_added_total", ()] += number

    def compilations(self) -> Mapping[str, int]:
        """Returns what was counted, ``PHASE.WHAT`` -> number, without zeros."""
        with self._lock:
            return {f"{phase}.{what}": number for (phase, what), number in self._findings.items() if number}

    def expose(self) -> bytes:
        """Returns all of it as text."""
        with self._lock:
            return "".join(self._lines()).encode()

    def _lines(self) -> Iterator[str]:
        for name, family in FAMILIES.items():
            yield f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
            if name == "aotgaudi_compilations_total":
                for labels, number in self._findings.items():
                    yield _line(name, family.labels, labels, number)
            for (other, values), value in self._values.items():
                if other == name:
                    yield _line(name, family.labels, values, value)


def _line(name: str, labels: tuple[str, ...], values: tuple[str, ...], value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} {value:g}\n" if pairs else f"{name} {value:g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
