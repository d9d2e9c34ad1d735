"""Explains captures: how two captures differ, and why a run was not warm.

`explain_run` reads the events of a run that has ended. They stay in its sandbox until the next run, and show what the server
hashed and what it compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.digest import differing
from aotgaudi.errors import SpecError
from aotgaudi.wrap.events import EventLog, ProcessLog, hashed_factors
from aotgaudi.wrap.file_watch import FileRules
from aotgaudi.wrap.launch import server_kind
from aotgaudi.wrap.launch_comparison import Comparison, Difference, compare
from aotgaudi.wrap.verdict import findings_of


@dataclass(frozen=True, slots=True)
class CaptureDifference:
    """How capture B differs from capture A.

    Attributes:
        launches: The components and conditions that differ.
        added, removed, changed: Paths of files, sorted. `changed` files have other bytes.
    """

    launches: Comparison
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        launches = self.launches
        return bool(launches.components or launches.unmet or launches.established or self.num_files)

    @property
    def num_files(self) -> int:
        """How many files differ."""
        return len(self.added) + len(self.removed) + len(self.changed)


def capture_difference(old: Bundle, new: Bundle) -> CaptureDifference:
    """Returns the differences between two bundles of captures. Raises SpecError if one holds programs."""
    before, after = _files(old), _files(new)
    rules = server_kind(old.launch.guest).variable_rules
    return CaptureDifference(
        launches=compare(old.launch, new.launch, rules),
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=tuple(sorted(path for path in before.keys() & after.keys() if before[path] != after[path])),
    )


def _files(bundle: Bundle) -> Mapping[str, str]:
    return {file.path: str(file.digest) for file in bundle.require_capture().files}


_FOLDER = "events"


@dataclass(frozen=True, slots=True)
class RunExplained:
    """What the events of a run show.

    Attributes:
        num_processes: How many processes had an agent.
        num_factors: How many values were hashed.
        factors: The values that differ from the build's; None on a side that did not hash it.
        deeds: What must not happen in a start from sealed files, one line each.
    """

    num_processes: int
    num_factors: int
    factors: tuple[Difference, ...]
    deeds: tuple[str, ...]


def explain_run(root: Path, sealed: Mapping[str, Mapping[str, str]]) -> RunExplained:
    """Compares the events in the sandbox at `root` with the factors of a capture. Raises SpecError."""
    processes = _processes(root)
    hashed = hashed_factors(processes)
    return RunExplained(
        num_processes=len(processes),
        num_factors=sum(map(len, hashed.values())),
        factors=tuple(_differences(sealed, hashed)),
        deeds=tuple(dict.fromkeys(_deeds(processes, root))),
    )


def _processes(root: Path) -> tuple[ProcessLog, ...]:
    log = EventLog(root / _FOLDER)
    try:
        os.scandir(root / _FOLDER).close()
        log.read()
    except OSError as error:
        raise SpecError(
            str(root), f"cannot be read as the root of a run: {error.strerror}", "the --root of aotgaudi run"
        ) from error
    if not log.processes:
        raise SpecError(str(root), "has no events of a run", "the --root of aotgaudi run, after it has ended")
    return tuple(log.processes.values())


def _differences(
    sealed: Mapping[str, Mapping[str, str]], here: Mapping[str, Mapping[str, str]]
) -> Iterator[Difference]:
    """Yields the differences in groups that both hashed. A run that was ended early has hashed fewer groups."""
    for group in sorted(sealed.keys() & here.keys()):
        for name, before, after in sorted(differing(sealed[group], here[group])):
            yield Difference(f"{group}.{name}", before, after)


def _deeds(processes: Sequence[ProcessLog], root: Path) -> Iterator[str]:
    """Yields what was compiled or refused, in the words of ``aotgaudi run``."""
    for process, finding in findings_of(processes, (), FileRules(root), is_watched=False):
        if finding.phase != "cold" and finding.what not in ("file", "trace"):
            yield f"{process}: {finding}"
