"""One start of a server in a build: restore files, start the server, warm it up, flush and end it, empty the sandbox.

`build_run` returns what the server did, as a `Ran`. It raises only if there is nothing to judge, because the server ended,
hung or broke off an answer. A start from empty caches and one from captured files differ in nothing else.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.bundle.launch import Launch
from aotgaudi.errors import CaptureError, counted
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap.adapters.base import Phase
from aotgaudi.wrap.client import WrappedServerError
from aotgaudi.wrap.collect import Secret
from aotgaudi.wrap.exercise import in_order_of_proof
from aotgaudi.wrap.file_watch import FileChanges, compare
from aotgaudi.wrap.launch import Found
from aotgaudi.wrap.observe import Observer
from aotgaudi.wrap.output import last_line, tail_of
from aotgaudi.wrap.restore import Source, restore_files
from aotgaudi.wrap.sandbox import Sandbox, open_sandbox
from aotgaudi.wrap.session import STATE_BYTES, Plan, Session, link_model, plan_for
from aotgaudi.wrap.verdict import AnswerDigests, Finding, Seen

_FLUSH = "f"
_FLUSH_SECONDS = 600.0
"""Enough time to write a recipe cache of tens of gigabytes."""
_KILLED = 137
"""128 + SIGKILL: the server did not end after SIGTERM."""


class Progress(Protocol):
    """Shows the progress of a build."""

    def begin(self, heading: str) -> None:
        """A step begins."""
        ...

    def note(self, text: str) -> None:
        """The step has come this far. Replaces the last note."""
        ...

    def end(self, text: str) -> None:
        """The step is done and has this result."""
        ...

    def warn(self, text: str) -> None:
        """The user should know this, but the build goes on."""
        ...


@dataclass(frozen=True)
class Setting:
    """What all starts of a build have in common.

    Attributes:
        found, launch: What is started.
        root: The sandbox's root.
        objects: The store of captured bytes.
        log: Where the server's output goes.
        ready_seconds: How long the server may take until it serves.
        progress: Shows how the build goes on.
        secrets: Values that must not be shown if the server prints them.
        asks: Whether the launch's warm-up requests are sent.
        asks_all: Whether a start must send those, too, that only the build would send.
    """

    found: Found
    launch: Launch
    root: Path
    objects: ObjectStore
    log: IO[Any]
    ready_seconds: float
    progress: Progress
    secrets: tuple[Secret, ...] = ()
    asks: bool = True
    asks_all: bool = False


@dataclass(frozen=True)
class Ran:
    """What one start did.

    Attributes:
        ready_seconds: From the start until the server served.
        seen: Everything that was known once all requests were answered.
        after: How files had changed when the server ended.
        findings: What a warm start does not do, with the process that did it.
        answers: The digests of each answer, in the launch's order.
        answer_seconds: How long each answer took.
    """

    ready_seconds: float
    seen: Seen
    after: FileChanges
    findings: tuple[tuple[str, Finding], ...]
    answers: tuple[AnswerDigests, ...]
    answer_seconds: tuple[float, ...] = ()

    def counters(self, suffix: str) -> dict[str, int]:
        """Returns the server's own counters whose names end with `suffix`, summed over its processes."""
        total: Counter[str] = Counter()
        for process in self.seen.processes.values():
            total.update({name: value for name, value in process.counters.items() if name.endswith(suffix)})
        return {name: value for name, value in sorted(total.items()) if value}

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of finding occurred."""
        return dict(Counter(finding.what for _, finding in self.findings))


class EndedEarlyError(Exception):
    """The server ended, hung or broke off an answer: why, and what it had done by then."""

    def __init__(self, findings: tuple[tuple[str, Finding], ...], cause: str) -> None:
        super().__init__(cause)
        self.findings, self.cause = findings, cause


@contextmanager
def build_run(
    setting: Setting,
    files: Sequence[CapturedFile] = (),
    *,
    before: Callable[[Sandbox], object] = lambda _: None,
    between: Callable[[Sandbox], object] = lambda _: None,
) -> Iterator[tuple[Ran, Sandbox]]:
    """Starts the server with only `files` in its caches. After it has ended, yields what it did, and its sandbox.

    It is refused nothing. `before` is called before the server starts, `between` after it has ended.

    Raises:
        EndedEarlyError: The server failed.
        CaptureError: It did not end when it was asked to, or a build step before it failed.
        SpecError, UntrustedError, StoreError: The sandbox cannot be used, or has no room.
    """
    phase: Phase = "measure" if files else "cold"
    needed = sum(file.digest.size_bytes for file in files)
    with open_sandbox(setting.root, needed_bytes=needed) as sandbox:
        if files:
            restore_files(files, Source(setting.objects.path, "the capture", "build it again"), sandbox.root)
        link_model(setting.found, setting.launch, sandbox)
        before(sandbox)
        sealed = {file.path: file.digest for file in files}
        plan = plan_for(setting.found, setting.launch, sandbox, phase, sealed=sealed)
        for step in () if files else setting.found.adapter.build_steps(setting.launch):
            _run_step(setting, plan, sandbox, step)
        ran = _run(setting, plan, sandbox, phase)
        between(sandbox)
        yield ran, sandbox


def _run(setting: Setting, plan: Plan, sandbox: Sandbox, phase: Phase) -> Ran:
    with Session(plan, sandbox, phase=STATE_BYTES[phase], output=setting.log) as session:
        watch = _Watch(session, setting.progress)
        try:
            ready_seconds = session.wait_healthy(setting.ready_seconds, watch.look)
            session.set_phase(STATE_BYTES["exercise"])
            answers, answer_seconds = _ask(session, setting, watch)
            session.set_phase(STATE_BYTES["live"])
            session.settle()
            seen = replace(session.look(compares=plan.rules.has_sealed), answers=answers)
            session.set_phase(_FLUSH)
            session.settle(_FLUSH_SECONDS)
            status = session.end()
        except WrappedServerError as error:
            raise EndedEarlyError(watch.observer.history(), f"{error} ({_last_line(setting)})") from error
        if status == _KILLED:
            raise CaptureError(
                "the server did not end when it was asked to, and was killed: its caches may be truncated"
                f" ({_last_line(setting)})"
            )
        findings = watch.observer.history()
    after = compare(sandbox.root, plan.rules) if plan.rules.has_sealed else FileChanges()
    return Ran(ready_seconds, seen, after, findings, answers, answer_seconds)


def _ask(
    session: Session, setting: Setting, watch: _Watch
) -> tuple[tuple[AnswerDigests, ...], tuple[float, ...]]:
    """Sends the launch's requests. Returns the answers, and how long each took, in the launch's order."""
    requests = setting.launch.exercise.requests if setting.asks else ()
    is_proof = session.plan.rules.has_sealed and not setting.asks_all
    order = in_order_of_proof(requests) if is_proof else range(len(requests))
    times = [time.monotonic()]

    def answered() -> None:
        times.append(time.monotonic())
        watch.num_answered += 1
        watch.look()

    watch.num_requests = len(requests)
    sent = session.warm_up((requests[index] for index in order), on_answer=answered, needs_success=True)
    took = (end - begin for begin, end in itertools.pairwise(times))
    rows = sorted(zip(order, sent, took, strict=True), key=lambda row: row[0])
    return tuple(answer for _, answer, _ in rows), tuple(seconds for _, _, seconds in rows)


class _Watch:
    """Shows how a start goes on, and what the server does that a warm one does not."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session, self._progress = session, progress
        self.observer = Observer(session)
        self.num_answered = self.num_requests = 0

    def look(self) -> None:
        self.observer.poll()
        asked = f", {self.num_answered} of {self.num_requests} requests" if self.num_requests else ""
        self._progress.note(f"{self._session.seconds:.0f} s{asked}; {describe_counts(self.observer.counts)}")


def _run_step(setting: Setting, plan: Plan, sandbox: Sandbox, words: Sequence[str]) -> None:
    """Runs a compiler that the server brings, in the environment of the cold run. Raises CaptureError."""
    step = Plan(tuple(words), plan.environment, plan.address, plan.rules, plan.repairs)
    with Session(step, sandbox, phase=STATE_BYTES["cold"], output=setting.log) as session:
        try:
            session.wait_healthy(
                setting.ready_seconds, lambda: setting.progress.note(f"{words[0]}: {session.seconds:.0f} s")
            )
        except WrappedServerError as error:
            if session.child.poll() == 0:
                return
            raise CaptureError(f"{' '.join(words)}: {error} ({_last_line(setting)})") from error
        raise CaptureError(f"{' '.join(words)}: serves, but a build step must end")


def _last_line(setting: Setting) -> str:
    """Returns the last line that the server wrote, without secrets, and where the rest is."""
    path = Path(setting.log.name)
    line = last_line(tail_of(path), (form for secret in setting.secrets for form in secret.forms()))
    return f"its last line: {line}; all of it: {path}" if line else f"its log, {path}, is empty"


def describe_counts(counts: Mapping[str, int]) -> str:
    """Returns in words what was compiled and generated."""
    compiled = sum(counts.get(what, 0) for what in ("process", "compile", "triton", "numba", "dynamo", "hpu"))
    generated = counts.get("generate", 0)
    return f"{counted(compiled, 'compiler run')}, {counted(generated, 'code generation')}"


def table_of(findings: Iterable[tuple[str, Finding]], most: int = 12) -> list[str]:
    """Returns one line for each finding: process, kind, text and stack."""
    rows = [(name, finding.what, finding.text, finding.stack) for name, finding in findings]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = [
        f"  {name:{widths[0]}}  {what:{widths[1]}}  {text}"
        + (f"\n{'':{sum(widths) + 6}}from {stack}" if stack else "")
        for name, what, text, stack in rows[:most]
    ]
    return [*lines, *([f"  ... and {len(rows) - most} more"] if len(rows) > most else [])]
