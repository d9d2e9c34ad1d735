"""One start of a server in a build: restored, started, exercised, flushed and ended, in a place that is emptied again.

What it did is told as a `Ran`. Only what cannot be judged raises: a server that ends, hangs or refuses an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.bundle.launch import Launch
from aotgaudi.errors import CaptureError
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap.client import WrappedServerError
from aotgaudi.wrap.file_watch import FileChanges, compare
from aotgaudi.wrap.launch import Found
from aotgaudi.wrap.restore import Source, restore_files
from aotgaudi.wrap.sandbox import Sandbox, open_sandbox
from aotgaudi.wrap.session import Plan, Session, link_model, plan_for
from aotgaudi.wrap.verdict import Finding, Seen, finding_of

Kind = Literal["cold", "load", "measure"]
_STATES: Mapping[Kind, str] = {"cold": "c", "load": "l", "measure": "m"}
_LIVE, _EXERCISE, _FLUSH = "v", "e", "f"
_ENDING = frozenset({"process", "compile", "triton", "dynamo", "hpu", "generate", "refused", "load"})
"""What a start from sealed files is ended for at once: a server that is kept from compiling may hang."""
_FLUSH_SECONDS = 600.0
"""A recipe cache of tens of gigabytes is written by then."""
_KILLED = 137
"""128 + SIGKILL: it did not end when it was asked to."""


class Progress(Protocol):
    """Is told how a build goes on."""

    def begin(self, heading: str) -> None:
        """A step begins."""
        ...

    def note(self, text: str) -> None:
        """What the step is at; the last one counts."""
        ...

    def end(self, text: str) -> None:
        """The step is done, and this came of it."""
        ...

    def warn(self, text: str) -> None:
        """Something that does not stop the build, and that its user should know."""
        ...


@dataclass(frozen=True)
class Setting:
    """What all starts of a build have in common.

    Attributes:
        found, launch: What is started.
        root: The place's, as the server sees it.
        objects: Where captured bytes are.
        log: What the server says goes there.
        ready_seconds: How long it may take until it serves.
        progress: Is told.
    """

    found: Found
    launch: Launch
    root: Path
    objects: ObjectStore
    log: IO[Any]
    ready_seconds: float
    progress: Progress


@dataclass(frozen=True)
class Ran:
    """What one start did.

    Attributes:
        ready_seconds: From its start until it served.
        seen: All that its witnesses said, when it had answered everything.
        after: What was seen of files once it had ended.
        findings: What a warm start does not do, by the process that did it.
        answers: The digest of each answer.
    """

    ready_seconds: float
    seen: Seen
    after: FileChanges
    findings: tuple[tuple[str, Finding], ...]
    answers: tuple[str, ...]

    def counters(self, suffix: str = "") -> dict[str, int]:
        """Returns the server's own counters, summed over its processes, whose names end so."""
        total: Counter[str] = Counter()
        for history in self.seen.histories.values():
            total.update({name: value for name, value in history.counters.items() if name.endswith(suffix)})
        return {name: value for name, value in sorted(total.items()) if value}

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of finding occurred."""
        return dict(Counter(finding.what for _, finding in self.findings))


class EndedEarlyError(Exception):
    """A start from sealed files that did what no warm start does, and was ended for it."""

    def __init__(self, findings: tuple[tuple[str, Finding], ...], cause: str = "") -> None:
        super().__init__(cause)
        self.findings, self.cause = findings, cause


@contextmanager
def build_run(
    setting: Setting,
    kind: Kind,
    files: Sequence[CapturedFile] = (),
    *,
    before: Callable[[Sandbox], object] = lambda _: None,
    between: Callable[[Sandbox], object] = lambda _: None,
) -> Iterator[tuple[Ran, Sandbox]]:
    """Starts the server with `files` alone in its caches, and yields what it did, and its place, once it has ended.

    `before` is called before it is started, `between` when it has ended, before its files are looked at.

    Raises:
        EndedEarlyError: from sealed files, it did what it is ended for at once, or failed.
        CaptureError: it failed from empty caches.
        SpecError, UntrustedError, StoreError: there is no such place, or no room.
    """
    needed = sum(file.digest.size_bytes for file in files)
    with open_sandbox(setting.root, needed_bytes=needed) as place:
        if files:
            restore_files(files, Source(setting.objects.path, "the capture", "build it again"), place.here)
        link_model(setting.found, setting.launch, place)
        before(place)
        sealed = {file.path: file.digest for file in files}
        plan = plan_for(setting.found, setting.launch, place, kind, sealed=sealed)
        for step in setting.found.adapter.build_steps(setting.launch) if kind == "cold" else ():
            _run_step(setting, plan, place, step)
        ran = _run(setting, plan, place, kind)
        between(place)
        yield ran, place


def _run(setting: Setting, plan: Plan, place: Sandbox, kind: Kind) -> Ran:
    with Session(plan, place, phase=_STATES[kind], output=setting.log) as session:
        watch = _Watch(session, setting.progress, ends=kind == "load")
        try:
            ready_seconds = session.wait_healthy(setting.ready_seconds, watch.look)
            session.set_phase(_EXERCISE)
            answers = _ask(session, setting, watch)
            session.set_phase(_LIVE)
            session.settle()
            seen = session.look(compares=plan.rules.has_sealed)
            session.set_phase(_FLUSH)
            session.settle(_FLUSH_SECONDS)
            status = session.end()
        except WrappedServerError as error:
            session.read()
            findings = _findings(session)
            if kind != "cold":
                raise EndedEarlyError(findings, f"{error} ({_tail_remedy(setting)})") from error
            raise CaptureError(f"{error} ({_tail_remedy(setting)})") from error
        if status == _KILLED:
            raise CaptureError(
                f"the server did not end when it was asked to, and was killed: its caches may be cut"
                f" ({_tail_remedy(setting)})"
            )
        findings = _findings(session)
    after = compare(place.here, plan.rules) if plan.rules.has_sealed else FileChanges()
    return Ran(ready_seconds, seen, after, findings, answers)


def _ask(session: Session, setting: Setting, watch: _Watch) -> tuple[str, ...]:
    requests = setting.launch.exercise.requests

    def answered(*_: object) -> None:
        watch.num_answered += 1
        watch.look()

    watch.num_requests = len(requests)
    return session.send_all(requests, on_answer=answered)


class _Watch:
    """Looks at what the server's processes say while it is waited for: tells of it, and ends what is not warm."""

    def __init__(self, session: Session, progress: Progress, *, ends: bool) -> None:
        self._session, self._progress, self._ends = session, progress, ends
        self.num_answered = self.num_requests = 0

    def look(self) -> None:
        self._session.read()
        findings = _findings(self._session)
        if self._ends and any(finding.what in _ENDING for _, finding in findings):
            raise EndedEarlyError(findings)
        counts: Counter[str] = Counter(finding.what for _, finding in findings)
        asked = f", {self.num_answered} of {self.num_requests} requests" if self.num_requests else ""
        self._progress.note(f"{self._session.seconds:.0f} s{asked}; {describe_counts(counts)}")


def _findings(session: Session) -> tuple[tuple[str, Finding], ...]:
    rows = []
    for history in session.account.histories.values():
        name = f"{history.role or 'process'} {history.pid}"
        for event in history.events:
            finding = finding_of(event, session.plan.rules)
            if finding is not None:
                rows.append((event.time, name, finding))
    return tuple((name, finding) for _, name, finding in sorted(rows, key=lambda row: row[0]))


def _run_step(setting: Setting, plan: Plan, place: Sandbox, words: Sequence[str]) -> None:
    """Runs a compiler that the guest brings, in the environment of the cold run. Raises CaptureError."""
    step = Plan(tuple(words), plan.environment, plan.address, plan.rules, plan.repairs, plan.witness_site)
    with Session(step, place, phase=_STATES["cold"], output=setting.log) as session:
        try:
            session.wait_healthy(
                setting.ready_seconds, lambda: setting.progress.note(f"{words[0]}: {session.seconds:.0f} s")
            )
        except WrappedServerError as error:
            if session.child.poll() == 0:
                return
            raise CaptureError(f"{' '.join(words)}: {error} ({_tail_remedy(setting)})") from error
        raise CaptureError(f"{' '.join(words)}: is a server, and should end")


def _tail_remedy(setting: Setting) -> str:
    return f"what it said: {setting.log.name}"


def describe_counts(counts: Mapping[str, int]) -> str:
    """Returns what was compiled and generated, for people."""
    compiled = sum(counts.get(what, 0) for what in ("process", "compile", "triton", "dynamo", "hpu"))
    generated = counts.get("generate", 0)
    return f"{_num(compiled, 'compiler run')}, {_num(generated, 'code generation')}"


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def table_of(findings: Iterable[tuple[str, Finding]], most: int = 12) -> list[str]:
    """Returns who compiled what, a line each: process, kind, what, and from where."""
    rows = [(name, finding.what, finding.text, finding.stack) for name, finding in findings]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = [
        f"  {name:{widths[0]}}  {what:{widths[1]}}  {text}"
        + (f"\n{'':{sum(widths) + 6}}from {stack}" if stack else "")
        for name, what, text, stack in rows[:most]
    ]
    return [*lines, *([f"  ... and {len(rows) - most} more"] if len(rows) > most else [])]
