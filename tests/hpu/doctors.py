"""Doctors that examine the double, each in a fork of this process, as many at once as there are cores.

Most probes see the same whether a fault is on or not, since their processes never ask whether it is. The double's journal
tells which faults were asked for; so a probe that did not ask has the outcome of the doctor that ran without faults,
with the directory that it left.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aotgaudi.doctor.hpu.lab import Lab, Outcome
from aotgaudi.doctor.hpu.report import DoctorReport, examine, selected
from aotgaudi.document import load_document
from aotgaudi.errors import AotGaudiError
from aotgaudi.machine import available_cores
from tests.hpu.forks import double_environment, start_probe

_NEVER_REMEMBERED = ("device.identity",)
_SECONDS = 60.0


@dataclass(frozen=True)
class Patient:
    """The double to examine.

    Attributes:
        folder: Where it is installed.
        fault: What goes wrong; empty: nothing.
        settings: Further environment variables.
        only: Ids of checks; empty: all.
        seconds: What a probe may take.
        memory: A file with outcomes, which is written where it is not there; None: every probe runs.
    """

    folder: Path
    fault: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    seconds: float = _SECONDS
    memory: Path | None = None


@dataclass(frozen=True)
class Remembered:
    """An outcome, the directory of recipes that was left, and the faults that were asked for."""

    outcome: Outcome
    files: Mapping[str, bytes]
    asked: frozenset[str]


class RememberingLab(Lab):
    """Takes outcomes from another examination where the fault makes no difference."""

    def __init__(self, directory: Path, patient: Patient, memory: dict[str, Remembered]) -> None:
        state = directory / "state"
        state.mkdir()
        self._journal = directory / "journal"
        environment = double_environment(
            patient.folder,
            AOTGAUDI_DOUBLE_STATE=str(state),
            AOTGAUDI_DOUBLE_FAULTS=patient.fault,
            AOTGAUDI_DOUBLE_JOURNAL=str(self._journal),
            **patient.settings,
        )
        super().__init__(
            directory, environment=environment, seconds=patient.seconds, patience_seconds=0, start=start_probe
        )
        self._fault, self.memory = patient.fault, memory

    def run(
        self,
        probe: str,
        recipes: Path | None = None,
        *,
        environment: Mapping[str, str | None] | None = None,
        **arguments: Any,
    ) -> Outcome:
        recipes = recipes or self.new_directory("recipes")
        name = json.dumps([probe, *map(self._without_places, (str(recipes), environment, arguments))])
        known = self.memory.get(name)
        if known and self._fault and self._fault not in known.asked:
            there = _files(recipes)
            for file, content in known.files.items():
                if there.get(file) != content:
                    (recipes / file).write_bytes(content)
            return known.outcome
        self._journal.write_bytes(b"")
        outcome = super().run(probe, recipes, environment=environment, **arguments)
        if probe not in _NEVER_REMEMBERED and not self._fault and outcome.is_whole:
            self.memory[name] = Remembered(outcome, _files(recipes), self._asked())
        return outcome

    def _asked(self) -> frozenset[str]:
        lines = map(json.loads, self._journal.read_text(encoding="utf-8").splitlines())
        return frozenset(line["asked"] for line in lines if "asked" in line)

    def _without_places(self, value: Any) -> Any:
        """`value` with digests in place of what lies at paths of ours."""
        if isinstance(value, Mapping):
            return {name: self._without_places(one) for name, one in value.items()}
        if not (isinstance(value, str) and value.startswith(str(self.directory))):
            return value
        path, *rest = value.split(",")
        return ",".join((_digest(Path(path)), *rest))


def _files(directory: Path) -> dict[str, bytes]:
    if not directory.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def _digest(path: Path) -> str:
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    mode = path.stat().st_mode if path.exists() else 0
    return hashlib.sha256(repr((mode, sorted(_files(path).items()))).encode()).hexdigest()


def examined(patients: Sequence[Patient]) -> list[DoctorReport | str]:
    """Returns a report of each, in order; what was refused, in one line, where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, str(number)) for number in range(len(patients))]
        waiting = list(zip(patients, results, strict=True))
        running: set[int] = set()
        while waiting or running:
            while waiting and len(running) < available_cores():
                running.add(_start(*waiting.pop(0)))
            running -= set(_ended(running))
            time.sleep(0.02)
        return [_read(path) for path in results]


def _read(path: Path) -> DoctorReport | str:
    data = path.read_bytes()
    return load_document(data, DoctorReport, "report") if data.startswith(b"{") else data.decode()


def _start(patient: Patient, result: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        atexit._clear()
        sys.path.insert(0, str(patient.folder))  # Doctor looks for the bridge's distribution.
        result.write_bytes(_examine(patient))
        code = 0
    finally:
        os._exit(code)


def _examine(patient: Patient) -> bytes:
    memory = patient.memory
    known = pickle.loads(memory.read_bytes()) if memory is not None and memory.exists() else {}
    directory = Path(tempfile.mkdtemp())
    try:
        lab = RememberingLab(directory, patient, known)
        report = examine(lab, selected(patient.only), lambda *_: None).dumps()
    except AotGaudiError as error:
        report = f"{error.exit_code}: {error}".encode()
    finally:
        shutil.rmtree(directory)
    if memory is not None and not memory.exists():
        memory.write_bytes(pickle.dumps(known))
    return report


def _ended(pids: Collection[int]) -> Iterator[int]:
    for pid in pids:
        if os.waitpid(pid, os.WNOHANG)[0]:
            yield pid
