"""The proof: a second start, from the captured files and nothing else, must compile nothing and add nothing.

A second start is refused nothing, and judged when it has ended. It may compute what the first one could not, for instance a
plan that needs the first one's measurements. What it adds is captured too, once, and proved again. If shards compiled
everything, the first start is the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aotgaudi.bundle.capture_receipt import (
    MAX_FILES,
    CapturedFile,
    Expected,
    Proof,
    StartCost,
    require_distinct,
)
from aotgaudi.errors import CaptureError
from aotgaudi.wrap.build_run import EndedEarlyError, Ran, Setting, build_run, table_of
from aotgaudi.wrap.collect import Collected, Rules, collect
from aotgaudi.wrap.events import ProcessLog, hashed_factors
from aotgaudi.wrap.exercise import start_cost
from aotgaudi.wrap.file_watch import FileChanges
from aotgaudi.wrap.sandbox import Sandbox
from aotgaudi.wrap.verdict import Finding, NotWarm, Undecided, before, judge

MAX_ADDITIONS = 1
"""How often additions of a start are added to the capture."""
_MAX_AGAIN = 100
_LOADED = frozenset({"library", "pickle", "recipe", "cubin"})


@dataclass(frozen=True)
class Cold:
    """What the proof must repeat of the cold run: its answers, and the artifacts that it counted as saved."""

    answers: tuple[str, ...]
    saved: Mapping[str, int] = field(default_factory=dict)

    @property
    def artifacts(self) -> Mapping[str, int]:
        """The number of whole artifacts of each kind that were saved (``num_aot_artifacts_saved``).

        Torch's counts of its own caches (``autograd_cache_saved``) are left out, because loading a whole artifact skips
        them.
        """
        ending = "_saved"
        return {
            name.removesuffix(ending): number
            for name, number in self.saved.items()
            if name.endswith(f"_artifacts{ending}")
        }


@dataclass(frozen=True)
class Proved:
    """A proved capture.

    Attributes:
        files: The files, by path.
        expected: What every start from them must show.
        factors: What the server hashed.
        proof: The receipt's record of the proof.
        residuals: Work that no file saves: what the server does at every start, and what this one traced or compiled in
            memory.
        ready_seconds: How long the server took until it served.
        num_loaded: How many artifacts it loaded.
        start: What every start is asked, and what that cost.
    """

    files: tuple[CapturedFile, ...]
    expected: Expected
    factors: Mapping[str, Mapping[str, str]]
    proof: Proof
    residuals: tuple[str, ...]
    ready_seconds: float
    num_loaded: int
    start: StartCost


@dataclass(frozen=True)
class _Failure:
    """Why a start proved nothing: what its processes did, other reasons, and the files that it added."""

    findings: tuple[tuple[str, Finding], ...]
    reasons: tuple[str, ...]
    added: tuple[CapturedFile, ...] = ()


def prove(setting: Setting, rules: Rules, files: Sequence[CapturedFile], cold: Cold) -> Proved:
    """Starts the server from `files` alone, and again with what it added. Returns the proved capture.

    The requests that a start sends come first, and the others in reverse. If that compiles something, then a start needs all
    of them, in the order of the build.

    Raises CaptureError with a table of what each process compiled.
    """
    try:
        return _prove(setting, rules, files, cold)
    except CaptureError as error:
        if setting.asks_all or all(request.at_start for request in setting.launch.exercise.requests):
            raise
        cause = " ".join(str(error).split("\n")[1:2]).strip()
        setting.progress.warn(
            f"each start has to send all requests, in the build's order; proving that ({cause})"
        )
        return _prove(replace(setting, asks_all=True), rules, files, cold)


def _prove(setting: Setting, rules: Rules, files: Sequence[CapturedFile], cold: Cold) -> Proved:
    held, num_additions = tuple(files), 0
    while True:
        found = _start(setting, rules, held, cold)
        if isinstance(found, Proved):
            return found
        if not found.added or num_additions == MAX_ADDITIONS:
            raise _refusal(found, num_additions)
        setting.progress.note(f"{len(found.added)} files more, which a second start adds; proving again")
        held, num_additions = _with(held, found.added), num_additions + 1


def proved_by(setting: Setting, files: Sequence[CapturedFile], ran: Ran) -> Proved | None:
    """Returns what a start from `files` proves; None if it compiled or added something.

    Its answers are not compared with others.
    """
    found = _judge(setting, tuple(files), ran, Cold(tuple(answer.whole for answer in ran.answers)))
    return found if isinstance(found, Proved) else None


def _start(setting: Setting, rules: Rules, held: tuple[CapturedFile, ...], cold: Cold) -> Proved | _Failure:
    """Starts the server from `held`, refuses it nothing, and judges what it did."""
    try:
        with build_run(setting, held) as (ran, sandbox):
            found = _judge(setting, held, ran, cold)
            if isinstance(found, Proved):
                return found
            return replace(found, added=_added(setting, rules, ran, sandbox))
    except EndedEarlyError as early:
        return _Failure(early.findings, (early.cause,))


def _added(setting: Setting, rules: Rules, ran: Ran, sandbox: Sandbox) -> tuple[CapturedFile, ...]:
    """Returns the files that a start added; none if it also changed or removed captured ones, as every later start would."""
    sight = ran.seen.files | ran.after
    if sight.changed or sight.missing or not sight.added:
        return ()
    there: Collected = collect(sandbox.root, rules, setting.objects)
    return tuple(file for file in there.files if file.path in sight.added)


def _with(held: Sequence[CapturedFile], added: Sequence[CapturedFile]) -> tuple[CapturedFile, ...]:
    files = tuple(sorted((*held, *added), key=lambda file: file.path))
    if len(files) > MAX_FILES:
        raise CaptureError(
            f"the server left {len(files)} files in its caches, at most {MAX_FILES} are captured"
        )
    try:
        require_distinct(file.path for file in files)
    except ValueError as error:
        raise CaptureError(f"a file that the server added cannot be captured: its path {error}") from error
    return files


def _judge(setting: Setting, held: tuple[CapturedFile, ...], ran: Ran, cold: Cold) -> Proved | _Failure:
    processes = [before(process, ran.seen.phase) for process in ran.seen.processes.values()]
    expected = setting.found.adapter.expected(setting.launch, processes)
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
    return Proved(
        files=held,
        expected=expected.model_copy(update={"answers": statuses}),
        factors=hashed_factors(processes),
        proof=Proof(counts=_counts(ran, expected), witnesses=_witnesses(ran, processes)),
        residuals=(*setting.found.adapter.residuals(setting.launch), *_again(processes)),
        ready_seconds=ran.ready_seconds,
        num_loaded=sum(expected.loads.values()),
        start=start_cost(setting.launch.exercise.requests, ran.answer_seconds, asks_all=setting.asks_all),
    )


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


def _not_loaded(ran: Ran, cold: Cold) -> Iterator[str]:
    """Yields the kinds of whole artifacts of which the second start loaded fewer than the first one saved."""
    loaded = ran.counters("_loaded")
    for kind, saved in cold.artifacts.items():
        found = loaded.get(f"{kind}_loaded", 0)
        if found < saved:
            yield f"{kind}: {found} of {saved} artifacts that the first start saved were loaded"


def _counts(ran: Ran, expected: Expected) -> dict[str, int]:
    return {
        "compile": 0,
        "generate": 0,
        "new_files": 0,
        "loads": sum(expected.loads.values()),
        "requests": len(ran.answers),
        "processes": len(ran.seen.processes),
    }


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


def _witnesses(ran: Ran, processes: Sequence[ProcessLog]) -> tuple[str, ...]:
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
