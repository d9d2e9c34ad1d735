"""What is new of a guest since its judge last looked: what its witnesses said, and what was seen of its files."""

from __future__ import annotations

from collections.abc import Sequence

from aotgaudi.wrap.supervisor.metrics import Metrics
from aotgaudi.wrap.watch.files import FileSight
from aotgaudi.wrap.watch.findings import EXIT_BYTES, EXIT_NOT_WARM, PHASES, Finding, finding_of
from aotgaudi.wrap.watch.session import Session

_MAX_REMEMBERED = 200
_CAUSE_SECONDS = 0.5


class News:
    """The findings of a session, counted as they come; `findings` are the last of them. One thread only."""

    def __init__(self, session: Session, metrics: Metrics) -> None:
        self._session, self._metrics = session, metrics
        self._files, self._is_blind = FileSight(), False
        self._first_file: float | None = None
        self.findings: tuple[Finding, ...] = ()
        self.is_new = False
        """Whether there was anything when it was last taken."""

    def take(self) -> list[Finding]:
        """Returns what was found since the last time, and counts it."""
        rules = self._session.plan.rules
        said = self._session.news()
        found = [finding_of(event, rules) for event in said]
        findings = [finding for finding in found if finding is not None and finding.phase != "cold"]
        findings += [*self._of_files(), *self._of_unreadable()]
        self.is_new = bool(said or findings)
        self._metrics.count(findings)
        self.findings = (*self.findings, *findings)[-_MAX_REMEMBERED:]
        return findings

    def lack_their_cause(self, now: float) -> bool:
        """Whether files alone speak against it, and only just now: who wrote a source runs a compiler next, and says so.

        `now` is by one clock, in seconds.
        """
        if not self.findings or any(one.what != "file" for one in self.findings):
            return False
        if self._first_file is None:
            self._first_file = now
        return now - self._first_file < _CAUSE_SECONDS

    def _of_files(self) -> list[Finding]:
        """What was seen of files since the last turn: the second witness counts for itself."""
        files = self._session.files()
        self._metrics.count_files(len(_new(files.added, self._files.added)))
        news = [
            *((path, "was added", EXIT_NOT_WARM) for path in _new(files.added, self._files.added)),
            *((path, "was changed", EXIT_BYTES) for path in _new(files.changed, self._files.changed)),
            *((path, "was removed", EXIT_NOT_WARM) for path in _new(files.missing, self._files.missing)),
        ]
        self._files = files
        phase = PHASES.get(self._session.phase, "live")
        return [Finding("file", phase, f"{path} {what}", exit_code=code) for path, what, code in news]

    def _of_unreadable(self) -> list[Finding]:
        """Once: from then on its witnesses may have said anything."""
        is_blind = any(one.num_unreadable for one in self._session.account.histories.values())
        is_new, self._is_blind = is_blind and not self._is_blind, is_blind or self._is_blind
        phase = PHASES.get(self._session.phase, "live")
        return [Finding("unknown", phase, "events of its witnesses cannot be read")] if is_new else []


def _new(now: Sequence[str], before: Sequence[str]) -> list[str]:
    return sorted({*now} - {*before})
