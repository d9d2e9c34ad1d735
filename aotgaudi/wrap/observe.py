"""The one observer of a wrapped server: captures, proofs and runs poll it for what a warm server does not do.

A finding comes from an agent's event, from a program or a library that no agent reported, from a change of a file, or from
events that cannot be read.

The events of a run that has ended stay in its sandbox until the next run. `explain_run` reads from them what the server
hashed and what it compiled.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aotgaudi.digest import differing
from aotgaudi.errors import SpecError
from aotgaudi.wrap.events import EventLog, ProcessLog, hashed_factors
from aotgaudi.wrap.file_watch import FileChanges, FileRules
from aotgaudi.wrap.launch_comparison import Difference
from aotgaudi.wrap.session import Session
from aotgaudi.wrap.verdict import (
    EXIT_BYTES,
    EXIT_NOT_WARM,
    PHASES,
    Finding,
    FindingPhase,
    finding_of,
    findings_of,
)

_MAX_REMEMBERED = 200
_CAUSE_SECONDS, _PAUSE_SECONDS = 2.0, 1.0
"""How long changes of files alone wait for their cause, the report of a compiler; and after how long a server is judged
again although nothing is new."""


class Observer:
    """Sees what a server does that a warm one does not. For one thread only.

    Attributes:
        counts: How many findings of each kind there were.
        recent: The last findings.
        files: How files had changed at the last poll.
        num_added: How many files have been added.
    """

    def __init__(self, session: Session, left_out: frozenset[FindingPhase] = frozenset()) -> None:
        """Findings of the phases `left_out` do not count."""
        self._session, self._left_out = session, left_out
        self.counts: Counter[str] = Counter()
        self.recent: tuple[Finding, ...] = ()
        self.files, self.num_added = FileChanges(), 0
        self._num_unreported, self._is_blind = 0, False
        self._is_new, self._due_at, self._first_file = False, 0.0, 0.0

    def poll(self) -> list[Finding]:
        """Returns the findings since the last call."""
        events = self._session.log.take_new()
        rules, files = self._session.plan.rules, self._session.files()
        told = [(event.pid, finding_of(event, rules, is_watched=files.is_watched)) for event in events]
        ranks = {one.pid: f"{one.replica}: " for one in self._session.log.processes.values() if one.replica}
        made = [replace(one, text=ranks.get(pid, "") + one.text) for pid, one in told if one is not None]
        findings = [one for one in (*made, *self._unreported()) if one.phase not in self._left_out]
        findings += [*self._of_files(files), *self._of_unreadable()]
        self._is_new = bool(events or findings)
        self.counts.update(one.what for one in findings)
        self.recent = (*self.recent, *findings)[-_MAX_REMEMBERED:]
        return findings

    def history(self) -> tuple[tuple[str, Finding], ...]:
        """Returns all that processes did, with the process, in order of time. Files that changed are not among it."""
        unreported = self._session.unreported()
        rules, is_watched = self._session.plan.rules, self._session.files().is_watched
        logs = self._session.log.processes.values()
        return tuple(findings_of(logs, unreported, rules, is_watched=is_watched))

    def is_due(self, now: float) -> bool:
        """Whether the server should be judged: the last poll saw anything new, or the pause is over.

        `now` is in seconds, always of the same clock. A call that returns True begins another pause.
        """
        if not self._is_new and now < self._due_at:
            return False
        self._due_at = now + _PAUSE_SECONDS
        return True

    def lacks_cause(self, now: float) -> bool:
        """Whether only files speak against the server, and only recently. `now` is as in `is_due`."""
        if not self.recent or any(one.what != "file" for one in self.recent):
            return False
        self._first_file = self._first_file or now
        return now - self._first_file < _CAUSE_SECONDS

    def _unreported(self) -> list[Finding]:
        found = self._session.unreported()
        new, self._num_unreported = found[self._num_unreported :], len(found)
        return [finding for _, finding in new]

    def _of_files(self, files: FileChanges) -> list[Finding]:
        """Returns changes of files since the last poll. They count, whatever the agents reported."""
        before, self.files = self.files, files
        added = _new(files.added, before.added)
        self.num_added += len(added)
        rows = [
            *((path, "was added", EXIT_NOT_WARM) for path in added),
            *((path, "was changed", EXIT_BYTES) for path in _new(files.changed, before.changed)),
            *((path, "was removed", EXIT_NOT_WARM) for path in _new(files.missing, before.missing)),
        ]
        return [Finding("file", self._phase, f"{path} {what}", exit_code=code) for path, what, code in rows]

    def _of_unreadable(self) -> list[Finding]:
        """Returns a finding if lines cannot be read, once: from then on the agents may have written anything."""
        if self._is_blind or not any(one.num_unreadable for one in self._session.log.processes.values()):
            return []
        self._is_blind = True
        return [Finding("unknown", self._phase, "events of its agents cannot be read")]

    @property
    def _phase(self) -> FindingPhase:
        return PHASES.get(self._session.phase, "live")


def _new(now: Sequence[str], before: Sequence[str]) -> list[str]:
    return sorted({*now} - {*before})


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
    log = EventLog(root / "events")
    try:
        os.scandir(root / "events").close()
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
