"""Starts of a server in a build, and the proof.

`build_run` makes one start: restores files, starts the server, warms it up, flushes and ends it, and empties the sandbox. It
raises only if there is nothing to judge, because the server ended, hung or broke off an answer. A start from empty caches
and one from captured files differ in nothing else.

The proof is a second start, from the captured files and nothing else, which must compile nothing and add nothing. It is
refused nothing, and judged when it has ended. It may compute what the first one could not, for instance a plan that needs
the first one's measurements. What it adds is captured too, once, and proved again. If shards compiled everything, the first
start is the proof.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from aotgaudi.bundle.capture_receipt import CapturedFile, CaptureReceipt, Proof
from aotgaudi.bundle.launch import Launch
from aotgaudi.errors import CaptureError, counted, store_error
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap.adapters.base import Phase
from aotgaudi.wrap.capture_records import UnprovenRow, builder_versions
from aotgaudi.wrap.client import WrappedServerError
from aotgaudi.wrap.collect import Rules, collect, require_capturable
from aotgaudi.wrap.events import ProcessLog, hashed_factors
from aotgaudi.wrap.exercise import in_order_of_proof, not_exercised, start_cost
from aotgaudi.wrap.file_watch import FileChanges, compare
from aotgaudi.wrap.launch import ServerCommand, features_of
from aotgaudi.wrap.observe import Observer
from aotgaudi.wrap.restore import Source, restore_files
from aotgaudi.wrap.sandbox import Sandbox, last_line, open_sandbox, tail_of
from aotgaudi.wrap.session import STATE_BYTES, Plan, Session, link_model, plan_for
from aotgaudi.wrap.verdict import AnswerDigests, Finding, NotWarm, Observation, Undecided, before, judge

MAX_ADDITIONS = 1
"""How often additions of a start are added to the capture."""
_MAX_AGAIN = 100
_LOADED = frozenset({"library", "pickle", "recipe", "cubin"})
_FLUSH = "f"
_FLUSH_SECONDS = 600.0
"""Enough time to write a recipe cache of tens of gigabytes."""
_END_SECONDS = 60.0
"""Enough time for many processes to end on a busy machine. Nobody waits for a server that a build ends."""
_STEP_SECONDS = 0.1
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
class BuildContext:
    """What all starts of a build have in common.

    Attributes:
        found, launch: What is started.
        objects: The store of captured bytes.
        log: Where the server's output goes.
        ready_seconds: How long the server may take until it serves.
        progress: Shows how the build goes on.
        rules: How its files are collected. The secrets in them must not be shown if the server prints them.
        asks: Whether the launch's warm-up requests are sent.
        asks_all: Whether a start must send those, too, that only the build would send.
    """

    found: ServerCommand
    launch: Launch
    objects: ObjectStore
    log: IO[Any]
    ready_seconds: float
    progress: Progress
    rules: Rules
    asks: bool = True
    asks_all: bool = False


@dataclass(frozen=True)
class RunResult:
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
    seen: Observation
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
    context: BuildContext, files: Sequence[CapturedFile] = (), *, given: Mapping[str, str] | None = None
) -> Iterator[tuple[RunResult, Sandbox]]:
    """Starts the server with only `files` in its caches. After it has ended, yields what it did, and its sandbox.

    It is refused nothing. A cold run has `given`, path below the root -> text of the files that the launch needs, which are
    written if there are no `files`. Its caches are put in order afterwards.

    Raises:
        EndedEarlyError: The server failed.
        CaptureError: It did not end when it was asked to, or a build step before it failed.
        SpecError, UntrustedError, StoreError: The sandbox cannot be used, or has no room.
    """
    phase: Phase = "measure" if files else "cold"
    adapter, launch = context.found.adapter, context.launch
    needed = sum(file.digest.size_bytes for file in files)
    with open_sandbox(Path(launch.place.root), needed_bytes=needed) as sandbox:
        if files:
            restore_files(files, Source(context.objects.path, "the capture", "build it again"), sandbox.root)
        link_model(context.found, launch, sandbox)
        sealed = {file.path: file.digest for file in files}
        plan = plan_for(context.found, launch, sandbox, phase, sealed=sealed)
        if not files:
            _put(given or {}, sandbox)
            for step in adapter.build_steps(launch):
                _run_step(context, plan, sandbox, step)
        ran = _run(context, plan, sandbox, phase)
        if given is not None:
            adapter.settle(sandbox.root)
        yield ran, sandbox


def _put(given: Mapping[str, str], sandbox: Sandbox) -> None:
    """Writes the files that the launch needs. Raises StoreError."""
    for name, text in given.items():
        path = sandbox.root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise store_error("write", path, error) from error


def _run(context: BuildContext, plan: Plan, sandbox: Sandbox, phase: Phase) -> RunResult:
    with Session(plan, sandbox, phase=STATE_BYTES[phase], output=context.log) as session:
        watch = _Watch(session, context.progress)
        try:
            ready_seconds = session.wait_healthy(context.ready_seconds, watch.look)
            session.set_phase(STATE_BYTES["exercise"])
            answers, answer_seconds = _ask(session, context, watch)
            session.set_phase(STATE_BYTES["live"])
            session.settle()
            seen = replace(session.look(compares=plan.rules.has_sealed), answers=answers)
            session.set_phase(_FLUSH)
            session.settle(_FLUSH_SECONDS)
            status = session.end(_END_SECONDS)
        except WrappedServerError as error:
            raise EndedEarlyError(watch.observer.history(), f"{error} ({_last_line(context)})") from error
        if status == _KILLED:
            raise CaptureError(
                "the server did not end when it was asked to, and was killed: its caches may be truncated"
                f" ({_last_line(context)})"
            )
        findings = watch.observer.history()
    after = compare(sandbox.root, plan.rules) if plan.rules.has_sealed else FileChanges()
    return RunResult(ready_seconds, seen, after, findings, answers, answer_seconds)


def _ask(
    session: Session, context: BuildContext, watch: _Watch
) -> tuple[tuple[AnswerDigests, ...], tuple[float, ...]]:
    """Sends the launch's requests. Returns the answers, and how long each took, in the launch's order."""
    requests = context.launch.exercise.requests if context.asks else ()
    is_proof = session.plan.rules.has_sealed and not context.asks_all
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


def _run_step(context: BuildContext, plan: Plan, sandbox: Sandbox, words: Sequence[str]) -> None:
    """Runs a compiler that the server brings, in the environment of the cold run. Raises CaptureError.

    Only its end counts: sglang.compile_deep_gemm serves for a while.
    """
    step = replace(plan, words=tuple(words))
    with Session(step, sandbox, phase=STATE_BYTES["cold"], output=context.log) as session:
        while (status := session.child.poll()) is None and session.seconds < context.ready_seconds:
            context.progress.note(f"{words[0]}: {session.seconds:.0f} s")
            time.sleep(_STEP_SECONDS)
    if status != 0:
        why = "did not end in time" if status is None else f"ended with exit code {status}"
        raise CaptureError(f"{' '.join(words)}: {why} ({_last_line(context)})")


def _last_line(context: BuildContext) -> str:
    """Returns the last line that the server wrote, without secrets, and where the rest is."""
    path = Path(context.log.name)
    line = last_line(tail_of(path), (form for secret in context.rules.secrets for form in secret.forms()))
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


@dataclass(frozen=True)
class Proved:
    """A proved capture: its receipt, and how long the server took until it served."""

    receipt: CaptureReceipt
    ready_seconds: float


@dataclass(frozen=True)
class _Failure:
    """Why a start proved nothing: what its processes did, other reasons, and the files that it added."""

    findings: tuple[tuple[str, Finding], ...]
    reasons: tuple[str, ...]
    added: tuple[CapturedFile, ...] = ()


def prove(context: BuildContext, cold: UnprovenRow) -> Proved:
    """Starts the server from the files of a cold run alone, and again with what it added. Returns the proved capture.

    The requests that a start sends come first, and the others in reverse. If that compiles something, then a start needs all
    of them, in the order of the build.

    Raises CaptureError with a table of what each process compiled.
    """
    try:
        return _prove(context, cold)
    except CaptureError as error:
        if context.asks_all or all(request.at_start for request in context.launch.exercise.requests):
            raise
        cause = " ".join(str(error).split("\n")[1:2]).strip()
        context.progress.warn(
            f"each start has to send all requests, in the build's order; proving that ({cause})"
        )
        return _prove(replace(context, asks_all=True), cold)


def _prove(context: BuildContext, cold: UnprovenRow) -> Proved:
    held, num_additions = cold.files, 0
    while True:
        found = _start(context, held, cold)
        if isinstance(found, Proved):
            return found
        if not found.added or num_additions == MAX_ADDITIONS:
            raise _refusal(found, num_additions)
        context.progress.note(f"{len(found.added)} files more, which a second start adds; proving again")
        held = tuple(sorted((*held, *found.added), key=lambda file: file.path))
        require_capturable([file.path for file in held])
        num_additions += 1


def proved_by(
    context: BuildContext, files: tuple[CapturedFile, ...], ran: RunResult, cold: UnprovenRow
) -> Proved | None:
    """Returns what the cold run itself proves, which began with `files`; None if it compiled or added something."""
    found = _judge(context, files, ran, cold)
    return found if isinstance(found, Proved) else None


def _start(context: BuildContext, held: tuple[CapturedFile, ...], cold: UnprovenRow) -> Proved | _Failure:
    """Starts the server from `held`, refuses it nothing, and judges what it did."""
    try:
        with build_run(context, held) as (ran, sandbox):
            found = _judge(context, held, ran, cold)
            return found if isinstance(found, Proved) else replace(found, added=_added(context, ran, sandbox))
    except EndedEarlyError as early:
        return _Failure(early.findings, (early.cause,))


def _added(context: BuildContext, ran: RunResult, sandbox: Sandbox) -> tuple[CapturedFile, ...]:
    """Returns the files that a start added; none if it also changed or removed captured ones, as every later start would."""
    sight = ran.seen.files | ran.after
    if sight.changed or sight.missing or not sight.added:
        return ()
    there = collect(sandbox.root, context.rules, context.objects)
    return tuple(file for file in there.files if file.path in sight.added)


def _judge(
    context: BuildContext, held: tuple[CapturedFile, ...], ran: RunResult, cold: UnprovenRow
) -> Proved | _Failure:
    found, launch = context.found, context.launch
    processes = [before(process, ran.seen.phase) for process in ran.seen.processes.values()]
    expected = found.adapter.expected(launch, processes)
    expected = expected.model_copy(update={"answers": cold.answers})
    verdict = judge(ran.seen, expected)
    reasons: tuple[str, ...] = ()
    if isinstance(verdict, NotWarm):
        reasons = tuple(reason.text for reason in verdict.reasons)
    elif isinstance(verdict, Undecided):
        reasons = tuple(f"it is not known: {waiting}" for waiting in verdict.waiting_for)
    reasons = (*reasons, *_after(ran.after), *_unloaded(held, processes), *_not_loaded(ran, cold))
    if reasons or ran.findings:
        return _Failure(ran.findings, reasons)
    statuses = tuple(answer.status for answer in ran.answers)
    counts = {
        **dict.fromkeys(("compile", "generate", "new_files"), 0),
        "loads": sum(expected.loads.values()),
        "requests": len(ran.answers),
        "processes": len(processes),
    }
    asked, ranks = launch.exercise.requests, found.flags.address.ranks
    start = start_cost(asked, ran.answer_seconds, asks_all=context.asks_all, ranks=ranks)
    receipt = CaptureReceipt(
        manifest_id=launch.id,
        target=launch.target,
        builder=builder_versions(),
        files=held,
        left_out=cold.left_out,
        expected=expected.model_copy(update={"answers": statuses}),
        factors=hashed_factors(processes),
        proof=Proof(counts=counts, witnesses=_witnesses(ran, processes)),
        residuals=(*found.adapter.residuals(launch), *_again(processes)),
        repairs=launch.repairs,
        not_exercised=not_exercised(features_of(found), launch.exercise),
        start=start if asked else None,
    )
    return Proved(receipt, ran.ready_seconds)


def _after(sight: FileChanges) -> tuple[str, ...]:
    """Returns which files changed until the server had ended."""
    rows = (("added", sight.added), ("changed", sight.changed), ("removed", sight.missing))
    return tuple(f"{path} was {what}" for what, paths in rows for path in paths)


def _unloaded(held: Sequence[CapturedFile], processes: Sequence[ProcessLog]) -> tuple[str, ...]:
    """Reports a server that loaded nothing. One that runs eagerly, say, compiles nothing either, but is not warm."""
    if not any(file.kind in _LOADED for file in held):
        return ()
    events = [event for process in processes for event in process.events]
    if any(event.kind in ("loaded", "load") for event in events):
        return ()
    return ("nothing of what was captured was loaded: the server ran without it",)


def _not_loaded(ran: RunResult, cold: UnprovenRow) -> Iterator[str]:
    """Yields the kinds of whole artifacts of which the second start loaded fewer than the first one saved."""
    loaded = ran.counters("_loaded")
    for kind, saved in cold.artifacts.items():
        found = loaded.get(f"{kind}_loaded", 0)
        if found < saved:
            yield f"{kind}: {found} of {saved} artifacts that the first start saved were loaded"


def _again(processes: Sequence[ProcessLog]) -> Iterator[str]:
    """Yields what was traced, or compiled in memory, although all files were there: no file saves that."""
    told = [event for process in processes for event in process.events]
    traced = {event.text("name") for event in told if event.kind == "trace"}
    compiled = {
        event.text("name") for event in told if event.kind == "compile" and event.text("what") == "numba"
    }
    for what, names in (("Dynamo traces", traced), ("Numba compiles", compiled)):
        yield from (f"{what} {name}" for name in sorted(names)[:_MAX_AGAIN])
        if len(names) > _MAX_AGAIN:
            yield f"{what} {len(names) - _MAX_AGAIN} more"


def _witnesses(ran: RunResult, processes: Sequence[ProcessLog]) -> tuple[str, ...]:
    """Returns the kinds of evidence: agents in the processes, files (and inotify without a gap), the server's counters."""
    found = {"process"} if processes else set()
    found |= {"files"} if ran.seen.files.is_compared else set()
    found |= {"inotify"} if ran.seen.files.is_watched else set()
    found |= {"counters"} if any(process.counters for process in processes) else set()
    return tuple(sorted(found))


def _refusal(failure: _Failure, num_additions: int) -> CaptureError:
    tried = ", although what it added was captured" if num_additions else ""
    head = f"a second start from the captured files alone is not warm{tried}; nothing was sealed"
    texts = {finding.text for _, finding in failure.findings}
    others = [reason for reason in failure.reasons if not any(text in reason for text in texts)]
    lines = [*table_of(failure.findings), *(f"  {reason}" for reason in others[:12])]
    return CaptureError("\n".join([head, *lines]))
