"""What an event means for warmth: nothing, or a finding. One table, for the verdict before ready and the counts after it.

Whether a guest is warm: a pure function of what its processes said, what was seen of files, and what is expected.

It fails closed. A guest is warm where all of this holds, and "probably" is never:

* every process that has a witness has said everything up to the phase that is asked about (``state``), or its last word
  (``bye``), with no hole in the numbers of its events, and none that cannot be read; one that said that it becomes another
  program has ended, or said what it is now;
* as many processes of each required role have a witness as were expected, none of which lacks a required hook; those that
  load what was compiled (the workers, where there are any) have every one in place;
* nothing was compiled, generated again, refused, written to a cache, or loaded that is not sealed;
* the guest's own counters and what it loaded are what was expected;
* every file was compared with what is sealed, after that, and none was added, changed or missing, even in between;
* the exercise was answered as it was in the build.

The three witnesses (in the processes, the files, the guest's counters) are asked alike, so one that disagrees is enough.
Because numbers have no holes, *removing any event never turns "not warm" into "warm"*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, Union

from aotgaudi.bundle.capture_receipt import Expected
from aotgaudi.wrap.events import Event, ProcessLog
from aotgaudi.wrap.file_watch import FileChanges, FileRules

What = Literal[
    "process", "compile", "triton", "dynamo", "hpu", "generate", "trace", "file", "load", "refused", "unknown"
]
"""``process``: a compiler was started. ``compile``, ``triton``, ``dynamo``, ``hpu``: code was compiled in a process.
``generate``: code was made again, a cache miss. ``trace``: Dynamo ran, and nothing was made. ``file``: a cache was written
to. ``load``: something that is not sealed was loaded. ``refused``: the witness forbade it."""
Phase = Literal["cold", "load", "exercise", "live"]

PHASES: Mapping[str, Phase] = MappingProxyType(
    {
        "c": "cold",
        "l": "load",
        "m": "load",
        "e": "exercise",
        "v": "live",
        "r": "live",
        "f": "live",
        "s": "live",
    }
)
"""State byte -> the phase that metrics name."""

EXIT_NOT_WARM, EXIT_BYTES, EXIT_TARGET = 3, 4, 5

_COMPILES: Mapping[str, What] = MappingProxyType({"triton": "triton", "dynamo": "dynamo", "hpu": "hpu"})
_SILENT = frozenset({"hello", "hooks", "state", "counters", "factors", "repair", "loaded", "bye"})


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a warm guest does not do: one line about it, the innermost frames, an exit code."""

    what: What
    phase: Phase
    text: str
    stack: str = ""
    exit_code: int = EXIT_NOT_WARM
    pid: int = 0

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.text}, from {self.stack}" if self.stack else self.text


def finding_of(event: Event, rules: FileRules) -> Finding | None:
    """Returns what is wrong with one event; None where a warm guest may do it.

    An event of a type that is not known is a finding: this half and the witness are of one version.
    """
    if event.kind in _SILENT:
        return None
    read = _READERS.get(event.kind)
    if read is None:
        return _finding(event, "unknown", f"its witness says {event.kind!r}, which is not known here")
    return read(event, rules)


def _finding(event: Event, what: What, text: str, exit_code: int = EXIT_NOT_WARM) -> Finding:
    phase = PHASES.get(event.phase, "live")
    return Finding(what, phase, text, event.stack, exit_code, event.pid)


def _process(event: Event, rules: FileRules) -> Finding | None:
    del rules
    if event.text("what") != "compiler":
        return None
    return _finding(event, "process", f"a compiler was run: {event.text('argv')}")


def _write(event: Event, rules: FileRules) -> Finding | None:
    path = rules.relative(event.path)
    if path is None or rules.is_left_out(path):
        return None
    return _finding(event, "file", f"{path} was opened for writing")


def _refused(event: Event, rules: FileRules) -> Finding:
    del rules
    path = event.text("path")
    code = EXIT_BYTES if path else EXIT_NOT_WARM
    return _finding(event, "refused", f"refused: {path or event.text('argv')}: {event.text('why')}", code)


def _load(event: Event, rules: FileRules) -> Finding | None:
    if event.values.get("sealed") is True or not rules.has_sealed:
        return None
    return _finding(event, "load", f"{event.path} was loaded, and is not of the bundle", EXIT_BYTES)


def _compile(event: Event, rules: FileRules) -> Finding:
    del rules
    kind = event.text("what")
    return _finding(event, _COMPILES.get(kind, "compile"), f"{kind} compiled {event.text('name')}")


def _generate(event: Event, rules: FileRules) -> Finding:
    del rules
    return _finding(event, "generate", f"{event.text('what')} generated code again for {event.text('name')}")


def _trace(event: Event, rules: FileRules) -> Finding | None:
    """Before a guest is live it may trace: that is what the exercise is replayed for."""
    del rules
    if PHASES.get(event.phase, "live") != "live":
        return None
    return _finding(event, "trace", f"{event.text('name')} was traced")


def _fault(event: Event, rules: FileRules) -> Finding:
    del rules
    return _finding(event, "unknown", f"its witness failed at {event.text('hook')}: {event.text('error')}")


_READERS: Mapping[str, Callable[[Event, FileRules], Finding | None]] = MappingProxyType(
    {
        "process": _process,
        "write": _write,
        "refused": _refused,
        "load": _load,
        "compile": _compile,
        "generate": _generate,
        "trace": _trace,
        "fault": _fault,
    }
)


_MAX_NAMED = 5
_WORKERS = ("Worker", "EngineCore", "APIServer")


@dataclass(frozen=True)
class Seen:
    """All that is known of a guest at one moment.

    Attributes:
        histories: Name of the event file -> what that process said. To be read *after* `alive`.
        alive: The guest's processes that lived.
        rules: What may lie below the roots.
        files: What was seen of files; to be compared after the processes have answered.
        phase: The state byte that every process must have answered to.
        answers: The digests of what the exercise was answered with; None where it was not run.
    """

    histories: Mapping[str, ProcessLog]
    alive: frozenset[int]
    rules: FileRules
    files: FileChanges
    phase: str
    answers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a guest is not warm: one sentence, and the exit code that goes with it (3 not warm, 4 bytes)."""

    text: str
    exit_code: int = EXIT_NOT_WARM


@dataclass(frozen=True, slots=True)
class Warm:
    """Everything that was expected was seen, and nothing else."""


@dataclass(frozen=True, slots=True)
class NotWarm:
    """At least one thing was seen that a warm guest does not do; `reasons` is not empty, the first is the one to name."""

    reasons: tuple[Reason, ...]

    @property
    def exit_code(self) -> int:
        """What goes with the first reason."""
        return self.reasons[0].exit_code


@dataclass(frozen=True, slots=True)
class Undecided:
    """Nothing speaks against it yet, but something has not been said; `waiting_for` names it, and is not empty."""

    waiting_for: tuple[str, ...]


ONLY_FILES = Undecided(("a comparison of the files",))
"""Everything has been said, and nothing speaks against it; the files have not been compared since."""

Verdict = Union[Warm, NotWarm, Undecided]
Told = Sequence[ProcessLog]
"""What each process said up to the phase that is asked about."""


def judge(seen: Seen, expected: Expected) -> Verdict:
    """Returns the verdict. Pure: equal arguments give equal verdicts."""
    told = [before(history, seen.phase) for history in seen.histories.values()]
    against = [
        *_doings(told, seen.rules),
        *_lost(told, seen),
        *_unhooked(told, expected),
        *_of_files(told, seen),
    ]
    if against:
        return NotWarm(tuple(dict.fromkeys(against)))
    waiting = [*_silent(told, seen.phase), *_replaced(told, seen), *_absent(told, expected)]
    if waiting:
        return Undecided(tuple(waiting))
    against = [*_of_loads(told, expected), *_of_counters(told, expected), *_of_answers(seen, expected)]
    if against:
        return NotWarm(tuple(against))
    return Warm() if seen.files.is_compared else ONLY_FILES


def before(history: ProcessLog, phase: str) -> ProcessLog:
    """Returns what a process said up to its answer to `phase` or its ``bye``; everything where there is neither."""
    for index, event in enumerate(history.events):
        if _settles(event, phase):
            return replace(history, events=history.events[: index + 1])
    return history


def _settles(event: Event, phase: str) -> bool:
    if event.kind == "state":
        return event.values.get("to") == phase
    return event.kind == "bye" or (event.kind == "hello" and event.phase == phase)


def is_settled(history: ProcessLog, phase: str) -> bool:
    """Whether a process has said everything that it will say of what was before `phase`."""
    return any(_settles(event, phase) for event in history.events)


def _name(history: ProcessLog) -> str:
    return f"{history.role or 'process'} {history.pid}"


def _doings(told: Told, rules: FileRules) -> Iterator[Reason]:
    """What was done, the first first and files last: whoever reads one sentence wants the cause."""
    found = []
    for history in told:
        for event in history.events:
            finding = finding_of(event, rules)
            if finding is not None:
                row = finding.what == "file", event.time, f"{_name(history)}: {finding}", finding.exit_code
                found.append(row)
    for _, _, text, exit_code in sorted(found):
        yield Reason(text, exit_code)


def _lost(told: Told, seen: Seen) -> Iterator[Reason]:
    for history in told:
        if history.num_unreadable:
            yield Reason(f"{_name(history)}: {history.num_unreadable} of its events cannot be read")
        if [event.number for event in history.events] != list(range(len(history.events))):
            yield Reason(f"{_name(history)}: some of its events were lost")
        elif history.events and not any(event.kind == "hello" for event in history.events):
            yield Reason(f"{_name(history)}: it never said what it is")
        if history.pid not in seen.alive and not is_settled(history, seen.phase):
            yield Reason(f"{_name(history)} ended without a last word, so what it did is not known")


def _unhooked(told: Told, expected: Expected) -> Iterator[Reason]:
    for history in told:
        for hook in expected.hooks if history.role in expected.roles else ():
            if history.hooks.get(hook, False) is False:
                yield Reason(f"{_name(history)}: {hook} could not be watched")


def _of_files(told: Told, seen: Seen) -> Iterator[Reason]:
    """A file that none of the guest's processes opened for writing, and no compiler can have made, came from outside."""
    events = [event for history in told for event in history.events]
    written = {seen.rules.relative(event.path) for event in events if event.kind == "write"}
    has_compiled = any(event.kind == "process" and event.text("what") == "compiler" for event in events)
    for path in seen.files.added:
        if path in written or has_compiled:
            yield Reason(f"{path} was added to the cache")
        else:
            yield Reason(f"{path} was added to the cache, and not by the guest", EXIT_BYTES)
    for path in seen.files.changed:
        if path in written:
            yield Reason(f"{path} was written anew")
        else:
            yield Reason(f"{path} has not the bytes that were sealed", EXIT_BYTES)
    for path in seen.files.missing:
        yield Reason(f"{path} was removed from the cache")


def _silent(told: Told, phase: str) -> Iterator[str]:
    for history in told:
        if not history.events:
            yield f"the first word of process {history.pid}"
        elif not is_settled(history, phase):
            yield f"{_name(history)} to say that it has said everything"


def _replaced(told: Told, seen: Seen) -> Iterator[str]:
    """A process that said that it becomes another program, and lives: as one of Python it begins a file of its own."""
    latest: dict[int, int] = {}
    for name, history in seen.histories.items():
        latest[history.pid] = max(latest.get(history.pid, 0), _begun(name))
    for name, history in zip(seen.histories, told, strict=True):
        last = history.events[-1] if history.events else None
        is_replaced = last is not None and last.kind == "bye" and last.text("why") == "exec"
        if is_replaced and history.pid in seen.alive and _begun(name) == latest[history.pid]:
            yield f"{_name(history)} to say what it has become"


def _begun(name: str) -> int:
    """When a file of events was begun, by its name; see `events`."""
    digits = name.partition("-")[2].partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _absent(told: Told, expected: Expected) -> Iterator[str]:
    roles = Counter(history.role for history in told)
    for role, number in expected.roles.items():
        if roles[role] < number:
            yield f"a witness in {number - roles[role]} of {number} {role} processes"
    for history in _workers(told, expected):
        waiting = [hook for hook in expected.hooks if history.hooks.get(hook) is not True]
        if waiting:
            yield f"{_name(history)} to watch {_named(waiting)}"


def _workers(told: Told, expected: Expected) -> list[ProcessLog]:
    """The processes that load what was compiled: others may never import what is hooked."""
    role = next((role for role in _WORKERS if role in expected.roles), None)
    return [history for history in told if history.role == role]


def _of_loads(told: Told, expected: Expected) -> Iterator[Reason]:
    loads: Counter[str] = Counter()
    for history in told:
        loads.update(history.loads)
    wanted = sum(expected.loads.values())
    for name, number in expected.loads.items():
        if loads[name] != number:
            have = sum(min(loads[other], times) for other, times in expected.loads.items())
            yield Reason(
                f"{name} was {_times(loads[name])}, in the build it was {_times(number)}"
                f" ({have} of {wanted} artifacts loaded)"
            )
    for name in sorted(loads.keys() - expected.loads.keys()):
        yield Reason(f"{name} was loaded, which the build did not see")


def _of_counters(told: Told, expected: Expected) -> Iterator[Reason]:
    counters: Counter[str] = Counter()
    for history in told:
        counters.update(history.counters)
    for name, number in expected.counters.items():
        if counters[name] != number:
            yield Reason(f"the guest's own counter {name} is {counters[name]}, the build saw {number}")


def _of_answers(seen: Seen, expected: Expected) -> Iterator[Reason]:
    if seen.answers is None:
        return
    if len(seen.answers) != len(expected.answers):
        yield Reason(f"{len(seen.answers)} requests were answered, the exercise has {len(expected.answers)}")
    for index, (got, wanted) in enumerate(zip(seen.answers, expected.answers, strict=False)):
        if wanted and got != wanted:
            yield Reason(f"request {index} of the exercise was not answered as it was in the build")


def _times(number: int) -> str:
    return {0: "not loaded", 1: "loaded once"}.get(number, f"loaded {number} times")


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + more
