"""``aotgaudi doctor --hpu``: runs every check in order, and reports for programs (JSON) and for people (Markdown).

The contract with the bridge is what we rely on, line by line, and how certain public sources are about it. Its lines are
data, in ``contract.json``; docs/reference/hpu-contract.md has the same table. A check examines every line. Reports from
devices may change a line's mark.

The report contains no names of hosts or users, no serial numbers, no paths and no environment variables, so it can be sent
to anybody.
``python -m aotgaudi.doctor.hpu.report docs`` rewrites the committed schema.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import Field

import aotgaudi
from aotgaudi.backends.base import NOT_INSTALLED, version_of
from aotgaudi.doctor.hpu import device, lowering, recipes, whole
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, Outcome, Verdict
from aotgaudi.document import Document, Value
from aotgaudi.errors import SpecError, UnexaminedError
from aotgaudi.files import write_atomic
from aotgaudi.gaudi.environment import ABSENT
from aotgaudi.gaudi.identity import PLUGIN, DeviceType, device_type_of, python_version
from aotgaudi.manifest.schema import rendered_schema

Mark = Literal["confirmed", "inferred", "uncertain"]
"""Read in public source or the maker's documents; inferred from these; or neither."""


@dataclass(frozen=True, slots=True)
class ContractLine:
    """Something that we rely on.

    Attributes:
        statement: What holds.
        mark: How certain sources are, before anybody has run it on a device.
        source: Where that stands.
        otherwise: What follows if it does not hold.
        is_needed: Whether nothing can be built or served if it does not hold.
    """

    statement: str
    mark: Mark
    source: str
    otherwise: str
    is_needed: bool

    @property
    def consequence(self) -> str:
        """What follows if the line does not hold, for people."""
        return f"not usable: {self.otherwise}" if self.is_needed else self.otherwise


LINES: Mapping[str, ContractLine] = MappingProxyType(
    {
        line: ContractLine(**row)
        for line, row in json.loads(Path(__file__).with_name("contract.json").read_bytes()).items()
    }
)

KeyMode = Literal["stable", "pinned"]
JSON_NAME, MARKDOWN_NAME, SCHEMA_NAME = "doctor-hpu.json", "doctor-hpu.md", "doctor-hpu.schema.json"

_SIGNS: Mapping[Verdict, str] = {"confirmed": "yes", "refuted": "NO", "unclear": "?", "skipped": "-"}
_HEAD = """\
Each row is something that aotgaudi relies on of Gaudi's software (its docs/reference/hpu-contract.md has the sources). \
Holds: yes, NO, ? (its process came to no end: unclear), - (skipped, for the reason that was seen).

| check | line | what we rely on | sources say | holds | seen |
|---|---|---|---|---|---|"""
_PRIVATE = tuple(
    map(
        re.compile,
        (
            r"(?<![\w.>*])~?(/[\w.+@=-]+)+/?",  # Paths.
            r"\b[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",  # UUIDs.
            r"\b([0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b",  # Addresses of network cards.
            r"\b[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\b",  # Places on the PCI bus.
            r"\b(10|127|172|192)(\.\d{1,3}){3}\b",  # IPv4; a version begins with 1.
            r"\b[A-Z]{2}\d{8,}\b",  # Serial numbers of cards, as `hl-smi` shows them.
        ),
    )
)


class LineReport(Value):
    """One line of the contract: its mark before, the verdict, and what was seen."""

    line: str
    mark: Mark
    is_needed: bool
    verdict: Verdict
    observation: str

    @classmethod
    def of(cls, line: str, verdict: Verdict, observation: str) -> LineReport:
        """Returns the report of a line of the contract."""
        mark, is_needed = LINES[line].mark, LINES[line].is_needed
        return cls(line=line, mark=mark, is_needed=is_needed, verdict=verdict, observation=observation)


class CheckReport(Value):
    """One check, how long it took, and its lines."""

    id: str
    title: str
    seconds: float
    lines: tuple[LineReport, ...]


class DoctorReport(Document):
    """What was found on one machine.

    Attributes:
        is_double: Whether the bridge is the double: then nothing here is about a device.
        device_type: ``gaudi2``, say.
        versions: Of the software.
        key_mode: How recipe keys repeat: by themselves, or with FX's counter pinned.
    """

    schema_: Literal["aotgaudi.doctor/1"] = Field("aotgaudi.doctor/1", alias="schema")
    is_double: bool
    device_type: DeviceType | Literal["unknown"]
    versions: dict[str, str]
    key_mode: KeyMode | Literal["unknown"]
    checks: tuple[CheckReport, ...]

    def lines(self) -> Iterator[LineReport]:
        """Yields the findings of all checks."""
        for check in self.checks:
            yield from check.lines

    def of(self, verdict: Verdict) -> tuple[str, ...]:
        """Returns the lines with this verdict."""
        return tuple(line.line for line in self.lines() if line.verdict == verdict)

    def lacks(self) -> tuple[str, ...]:
        """Returns the lines that building and serving need and that were refuted or are unclear."""
        bad = (line for line in self.lines() if line.is_needed and line.verdict in ("refuted", "unclear"))
        return tuple(line.line for line in bad)

    def shortcomings(self) -> Iterator[str]:
        """Yields, for each refuted or unclear line, what follows or how to find out."""
        for check in self.checks:
            for found in check.lines:
                if found.verdict == "refuted":
                    yield f"{found.line} was refuted: {LINES[found.line].consequence}"
                elif found.verdict == "unclear":
                    again = f"`aotgaudi doctor --hpu --only {check.id}`"
                    yield f"{found.line} is unclear: {found.observation}; again, on a card that is idle: {again}"

    def summary(self) -> str:
        """Returns the report in one line. A partial examination never says usable."""
        lacks, num_examined = self.lacks(), len({line.line for line in self.lines()})
        if lacks:
            what = f"not usable for {', '.join(lacks)}"
        elif num_examined < len(LINES):
            what = f"examined in part, {num_examined} of {len(LINES)} lines: nothing that is needed was found not to hold"
        else:
            what = f"usable: torch_compile, keys {self.key_mode}"
        counts = ", ".join(f"{len(self.of(verdict))} {verdict}" for verdict in _SIGNS if self.of(verdict))
        return f"{self.prefix()}{what}; {counts}"

    def prefix(self) -> str:
        """Returns the beginning of each line about a double; empty for a device."""
        return "this is a double: " if self.is_double else ""

    def as_markdown(self) -> str:
        """Returns the report for people."""
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        follows = [f"* {row}" for row in self.shortcomings()]
        send = ["", "Please send this file, or the JSON, to the authors: it corrects the contract."]
        lines = [
            *(f"# {self.prefix()}{self.device_type}", "", self.summary(), "", versions, "", _HEAD),
            *self._rows(),
            *(["", "## What follows", "", *follows] if follows else []),
            *([] if self.is_double else send),
            "",
        ]
        return "\n".join(lines)

    def _rows(self) -> Iterator[str]:
        for check in self.checks:
            for found in check.lines:
                row = (
                    *(check.id, found.line, LINES[found.line].statement, found.mark),
                    *(_SIGNS[found.verdict], f"{self.prefix()}{found.observation}"),
                )
                yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def without_private(text: str) -> str:
    """Returns `text` without paths, addresses, serial numbers, and the names of this host and user."""
    shown = text
    for pattern in _PRIVATE:
        shown = pattern.sub("...", shown)
    host = socket.gethostname()
    for private in filter(None, (host, host.partition(".")[0], _user())):
        shown = re.sub(rf"\b{re.escape(private)}\b", "...", shown)
    return shown


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""  # A user id without a name.


def report_schema() -> bytes:
    """Returns the JSON Schema of a report, as committed."""
    return rendered_schema(DoctorReport.model_json_schema(), "aotgaudi doctor --hpu")


# Examining

CHECKS: tuple[HpuCheck, ...] = (*recipes.CHECKS, *device.CHECKS, *lowering.CHECKS, *whole.CHECKS)
"""All checks in the order in which they run: those that others need come first, and H-26, end to end, comes last."""

Progress = Callable[[HpuCheck, tuple[LineFinding, ...], DoctorReport], None]
"""Called after each check with its findings and the report so far."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a process that acquired the card knows of it. `capability` is V in the names of recipes."""

    name: str
    capability: str
    is_double: bool


def selected(ids: Collection[str]) -> tuple[HpuCheck, ...]:
    """Returns the checks with these ids; no ids mean all checks. Raises SpecError for an unknown id."""
    known = {check.id for check in CHECKS}
    for unknown in sorted(set(ids) - known):
        raise SpecError("--only", f"there is no check {unknown}", f"one of {', '.join(sorted(known))}")
    return tuple(check for check in CHECKS if not ids or check.id in ids)


def acquire(lab: Lab) -> Device:
    """Starts a process that acquires the card, and returns what it knows of the card.

    Raises:
        UnexaminedError: the bridge is not installed, or no card could be acquired.
    """
    require_bridge()
    outcome = device.device_of(lab)
    if not outcome.is_whole:
        raise UnexaminedError(f"{lab.card} could not be acquired: {outcome.problem} ({_remedy(outcome)})")
    return Device(*(outcome.values[name] for name in ("name", "capability", "is_double")))


def require_bridge() -> None:
    """Raises UnexaminedError unless the bridge is installed for this interpreter."""
    if version_of(PLUGIN) == NOT_INSTALLED:
        raise UnexaminedError(
            f"{PLUGIN} is not installed here, for {sys.executable} (it comes with Intel's PyTorch images for Gaudi; an"
            " environment of aotgaudi's own in one needs `python3 -m venv --system-site-packages`)"
        )


def _remedy(outcome: Outcome) -> str:
    if outcome.is_busy:
        return "doctor needs one that no process holds: `hl-smi` shows who does; --card N takes another"
    if ABSENT in outcome.problem:
        return "in a container: --runtime=habana -e HABANA_VISIBLE_DEVICES=all; `hl-smi` shows cards"
    return "that is what the bridge says on this machine, without aotgaudi, too: `python3 -c 'import torch'`"


def examine(lab: Lab, checks: Collection[HpuCheck], progress: Progress) -> DoctorReport:
    """Runs `checks`, reports each to `progress`, and returns the report.

    Raises UnexaminedError if no card can be acquired.
    """
    found = acquire(lab)
    report = DoctorReport(
        is_double=found.is_double,
        device_type=device_type_of(found.name) or "unknown",
        versions={
            **{package: version_of(package) for package in (PLUGIN, "torch", "transformers")},
            "python": python_version(),
            "synapse": found.capability,
            "aotgaudi": aotgaudi.__version__,
            "system": sys.platform,
        },
        key_mode="unknown",
        checks=(),
    )
    verdicts: dict[str, Verdict] = {}
    for check in checks:
        began = time.monotonic()
        findings = check.findings(lab, verdicts)
        verdicts.update({one.line: one.verdict for one in findings})
        lines = (LineReport.of(one.line, one.verdict, without_private(one.observation)) for one in findings)
        seconds = round(time.monotonic() - began, 1)
        done = CheckReport(id=check.id, title=check.title, seconds=seconds, lines=tuple(lines))
        all_done = tuple(sorted((*report.checks, done), key=lambda one: one.id))
        report = report.model_copy(update={"key_mode": _key_mode(verdicts), "checks": all_done})
        progress(check, findings, report)
    return report


def _key_mode(verdicts: Mapping[str, Verdict]) -> KeyMode | Literal["unknown"]:
    if verdicts.get("K-08") == "confirmed":
        return "stable"
    return "pinned" if verdicts.get("K-09") == "confirmed" else "unknown"


if __name__ == "__main__":
    write_atomic(Path(sys.argv[1]) / SCHEMA_NAME, report_schema())
