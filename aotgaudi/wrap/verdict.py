"""Whether a wrapped server is warm: a pure function of its events, of what was seen of its files, and of what is expected.

It fails closed. A server is warm only if all of this holds:

* Every process that has an agent has reported everything up to the given phase (``state``), or has ended in order (``bye``).
  The numbers of its events have no gap, and every line can be read. A process that announced another program has ended, or
  has reported again.
* Each required role has as many processes with an agent as expected, and each of them has every required hook. The processes
  that load compiled code (the workers, if there are any) have all hooks in place.
* Nothing was compiled, generated again, or refused, no sealed file was opened for writing, and nothing was loaded that is
  not sealed. No process, with an agent or without, ran a compiler, or loaded a library that was made since the server
  started.
* The server's own counters, and the artifacts that it loaded, are as expected. Of a Gaudi's recipes, only counters count.
* After that, every file was compared with its sealed bytes. None was changed or removed, not even for a moment, and none
  was added, except by a process with an agent that removed it again and loaded nothing of it (`Session.files`).
* The warm-up requests were answered as in the build: with the same status, and in the proof with the same text.

Agents, files and the server's counters are three independent sources, and the objection of one is enough. Because event
numbers have no gaps, *removing any event never turns "not warm" into "warm"*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, Union

from aotgaudi.bundle.capture_receipt import Expected
from aotgaudi.errors import CorruptError, NotWarmError
from aotgaudi.wrap.events import Event, ProcessLog, printable
from aotgaudi.wrap.exercise import COMPLETIONS, line_of, token_prompt
from aotgaudi.wrap.file_watch import FileChanges, FileRules

What = Literal[
    "process",
    "compile",
    "triton",
    "numba",
    "dynamo",
    "hpu",
    "generate",
    "trace",
    "file",
    "load",
    "refused",
    "unknown",
]
"""``process``: a compiler was started. ``compile``, ``triton``, ``numba``, ``dynamo``, ``hpu``: a process compiled code.
``generate``: code was made again after a cache miss. ``trace``: Dynamo ran, and made nothing. ``file``: a cache was written
to. ``load``: something that is not sealed was loaded. ``refused``: the agent refused it."""
FindingPhase = Literal["cold", "load", "exercise", "live"]

PHASES: Mapping[str, FindingPhase] = MappingProxyType(
    {"c": "cold", "l": "load", "m": "load", "e": "exercise", "v": "live", "f": "live"}
)
"""State byte -> the phase in metrics."""

_MAX_LINE, _MAX_PROMPT = 4000, 512
"""The most characters of a line, and tokens of its prompt: enough for another step than a short prompt's."""
EXIT_NOT_WARM, EXIT_BYTES = NotWarmError.exit_code, CorruptError.exit_code

_COMPILES: Mapping[str, What] = MappingProxyType(
    {"triton": "triton", "numba": "numba", "dynamo": "dynamo", "hpu": "hpu"}
)
_SILENT = frozenset({"hello", "hooks", "state", "counters", "factors", "repair", "loaded", "bye"})


@dataclass(frozen=True, slots=True)
class Cause:
    """A request that a server computed: its id, and the line of an exercise's file for the same request."""

    id: str
    line: str


@dataclass(frozen=True, slots=True)
class Finding:
    """An action that a warm server does not take.

    Holds one line about it, the innermost frames, an exit code, and the requests that were being computed.
    """

    what: What
    phase: FindingPhase
    text: str
    stack: str = ""
    exit_code: int = EXIT_NOT_WARM
    requests: tuple[Cause, ...] = ()

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.text}, from {self.stack}" if self.stack else self.text


def finding_of(event: Event, rules: FileRules, *, is_watched: bool = False) -> Finding | None:
    """Returns what is wrong with one event; None if a warm server may do it.

    An event of an unknown type is a finding, because the agent and this module have the same version. With `is_watched`,
    inotify tells what opening a file led to, so that the opening itself is no finding: libraries probe folders, and take
    locks. A sealed file with content is another matter, because nobody sees what is written to it through memory.
    """
    if event.kind in _SILENT:
        return None
    if event.kind == "write" and is_watched and rules.has_sealed and not rules.holds_bytes(event.path):
        return None
    read = _READERS.get(event.kind)
    if read is None:
        return _finding(event, "unknown", f"its agent reports {event.kind!r}, which is not known here")
    return read(event, rules)


def _finding(event: Event, what: What, text: str, exit_code: int = EXIT_NOT_WARM) -> Finding:
    phase = PHASES.get(event.phase, "live")
    return Finding(what, phase, text, event.stack, exit_code, tuple(_causes(event)))


def _causes(event: Event) -> Iterator[Cause]:
    """Yields the requests that an event names. A process wrote them, so they may have any form."""
    found = event.values.get("requests")
    for one in found if isinstance(found, list) else ():
        if isinstance(one, dict) and isinstance(one.get("body"), dict):
            number = one.get("num_prompt_tokens")
            prompt = token_prompt(min(number, _MAX_PROMPT) if isinstance(number, int) and number > 0 else 5)
            line = line_of(COMPLETIONS, {"prompt": prompt, "temperature": 0, **one["body"]})
            yield Cause(printable(str(one.get("id", ""))), printable(line, _MAX_LINE))


def _process(event: Event, _: FileRules) -> Finding | None:
    if event.text("what") != "compiler":
        return None
    return _finding(event, "process", f"a compiler was run: {event.text('argv')}")


def _write(event: Event, rules: FileRules) -> Finding | None:
    path = rules.relative(event.path)
    if path is None or rules.is_left_out(path):
        return None
    return _finding(event, "file", f"{path} was opened for writing")


def _refused(event: Event, _: FileRules) -> Finding:
    path = event.text("path")
    code = EXIT_BYTES if path else EXIT_NOT_WARM
    return _finding(event, "refused", f"refused: {path or event.text('argv')}: {event.text('why')}", code)


def _load(event: Event, rules: FileRules) -> Finding | None:
    if event.values.get("sealed") is True or not rules.has_sealed:
        return None
    return _finding(event, "load", f"{event.path} was loaded, and is not of the bundle", EXIT_BYTES)


def _compile(event: Event, _: FileRules) -> Finding | None:
    """Returns a finding, except for Numba before the server is live: no file holds what Numba compiles."""
    kind = event.text("what")
    if kind == "numba" and PHASES.get(event.phase, "live") != "live":
        return None
    return _finding(event, _COMPILES.get(kind, "compile"), f"{kind} compiled {event.text('name')}")


def _generate(event: Event, _: FileRules) -> Finding:
    return _finding(event, "generate", f"{event.text('what')} generated code again for {event.text('name')}")


def _trace(event: Event, _: FileRules) -> Finding | None:
    """Returns a finding only for a live server. Before that it may trace, which is what the warm-up requests are for."""
    if PHASES.get(event.phase, "live") != "live":
        return None
    return _finding(event, "trace", f"{event.text('name')} was traced")


def _fault(event: Event, _: FileRules) -> Finding:
    return _finding(event, "unknown", f"its agent failed at {event.text('hook')}: {event.text('error')}")


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


class AnswerDigests(NamedTuple):
    """The digests of an answer to a warm-up request. A receipt holds only `status`, because weights may differ.

    Attributes:
        whole: Of the status, and for a greedy request of the text. Compared within one build.
        status: Of the status alone.
    """

    whole: str
    status: str


_WORKERS = ("Worker", "EngineCore", "APIServer")


@dataclass(frozen=True)
class Observation:
    """Everything that is known of a server at one moment.

    Attributes:
        processes: Name of the event file -> what that process reported. Must be read *after* `alive`.
        alive: The server's living processes.
        rules: Which files may lie below the root.
        files: How files changed. They must be compared after the processes have confirmed the phase.
        phase: The state byte that every process must have confirmed.
        answers: The digests of the answers to the warm-up requests; None if none were sent.
        unreported: What processes did without an agent's report, with the process.
    """

    processes: Mapping[str, ProcessLog]
    alive: frozenset[int]
    rules: FileRules
    files: FileChanges
    phase: str
    answers: tuple[AnswerDigests, ...] | None = None
    unreported: tuple[tuple[str, Finding], ...] = ()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a server is not warm: one sentence, and its exit code (3 not warm, 4 bytes)."""

    text: str
    exit_code: int = EXIT_NOT_WARM


@dataclass(frozen=True, slots=True)
class Warm:
    """Everything that was expected was seen, and nothing else."""


@dataclass(frozen=True, slots=True)
class NotWarm:
    """The server did what a warm one does not do. `reasons` is not empty, and the first is the most important."""

    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Undecided:
    """Nothing speaks against the server yet, but something is not known. `waiting_for` names it, and is not empty."""

    waiting_for: tuple[str, ...]


ONLY_FILES = Undecided(("a comparison of the files",))
"""All processes have reported, and nothing speaks against the server, but the files have not been compared since."""

Verdict = Union[Warm, NotWarm, Undecided]


def judge(seen: Observation, expected: Expected) -> Verdict:
    """Returns the verdict. Pure: equal arguments give equal verdicts."""
    logs = [before(log, seen.phase) for log in seen.processes.values()]
    against = [
        *_doings(logs, seen),
        *_lost(logs, seen),
        *_unhooked(logs, expected),
        *_of_files(logs, seen),
    ]
    if against:
        return NotWarm(tuple(dict.fromkeys(against)))
    waiting = [*_silent(logs, seen.phase), *_replaced(logs, seen), *_absent(logs, expected)]
    if waiting:
        return Undecided(tuple(waiting))
    against = [*_of_loads(logs, expected), *_of_counters(logs, expected), *_of_answers(seen, expected)]
    if against:
        return NotWarm(tuple(against))
    return Warm() if seen.files.is_compared else ONLY_FILES


def before(log: ProcessLog, phase: str) -> ProcessLog:
    """Returns what a process reported up to its answer to `phase` or its ``bye``; everything if there is neither."""
    for index, event in enumerate(log.events):
        if _settles(event, phase):
            return replace(log, events=log.events[: index + 1])
    return log


def _settles(event: Event, phase: str) -> bool:
    if event.kind == "state":
        return event.values.get("to") == phase
    return event.kind == "bye" or (event.kind == "hello" and event.phase == phase)


def is_settled(log: ProcessLog, phase: str) -> bool:
    """Whether a process has reported everything that came before `phase`."""
    return any(_settles(event, phase) for event in log.events)


def has_failed(log: ProcessLog, phase: str) -> bool:
    """Whether a process reported that it failed to do what `phase` asks for, so that it will not confirm the phase."""
    faults = (event for event in log.events if event.kind == "fault" and event.phase == phase)
    return any(event.text("hook") == "state" for event in faults)


def findings_of(
    logs: Iterable[ProcessLog],
    unreported: Iterable[tuple[str, Finding]],
    rules: FileRules,
    *,
    is_watched: bool,
) -> list[tuple[str, Finding]]:
    """Returns what processes did that a warm server does not do, with the process, in order of time.

    `unreported` follows: what was seen without an agent's report.
    """
    told = ((event, log) for log in logs for event in log.events)
    found = ((event.time, log.title, finding_of(event, rules, is_watched=is_watched)) for event, log in told)
    rows = [(time, title, finding) for time, title, finding in found if finding is not None]
    return [*((title, finding) for _, title, finding in sorted(rows, key=lambda row: row[0])), *unreported]


def _doings(logs: Sequence[ProcessLog], seen: Observation) -> Iterator[Reason]:
    """Yields what the server did, but files last, because the first sentence should name the cause."""
    found = findings_of(logs, seen.unreported, seen.rules, is_watched=seen.files.is_watched)
    for title, finding in sorted(found, key=lambda row: row[1].what == "file"):
        yield Reason(f"{title}: {finding}", finding.exit_code)


def _lost(logs: Sequence[ProcessLog], seen: Observation) -> Iterator[Reason]:
    for log in logs:
        if log.num_unreadable:
            yield Reason(f"{log.title}: {log.num_unreadable} of its events cannot be read")
        if [event.number for event in log.events] != list(range(len(log.events))):
            yield Reason(f"{log.title}: some of its events were lost")
        elif log.events and not any(event.kind == "hello" for event in log.events):
            yield Reason(f"{log.title}: it never reported what it is")
        if log.pid not in seen.alive and not is_settled(log, seen.phase):
            yield Reason(f"{log.title} ended before its report was complete, so what it did is not known")


def _unhooked(logs: Sequence[ProcessLog], expected: Expected) -> Iterator[Reason]:
    for log in logs:
        for hook in expected.hooks if log.role in expected.roles else ():
            if log.hooks.get(hook, False) is False:
                yield Reason(f"{log.title}: {hook} could not be watched")


def _of_files(logs: Sequence[ProcessLog], seen: Observation) -> Iterator[Reason]:
    """Yields changes of files. An added file is foreign if no server process opened it for writing and no compiler ran."""
    events = [event for log in logs for event in log.events]
    written = {seen.rules.relative(event.path) for event in events if event.kind == "write"}
    has_compiled = any(event.kind == "process" and event.text("what") == "compiler" for event in events)
    has_compiled |= any(finding.what == "process" for _, finding in seen.unreported)
    for path in seen.files.added:
        if path in written or has_compiled:
            yield Reason(f"{path} was added to the cache")
        else:
            yield Reason(f"{path} was added to the cache, and not by the server", EXIT_BYTES)
    for path in seen.files.changed:
        if path in written:
            yield Reason(f"{path} was written anew")
        else:
            yield Reason(f"{path} does not have the bytes that were sealed", EXIT_BYTES)
    for path in seen.files.missing:
        yield Reason(f"{path} was removed from the cache")


def _silent(logs: Sequence[ProcessLog], phase: str) -> Iterator[str]:
    for log in logs:
        if not log.events:
            yield f"the first event of process {log.pid}"
        elif not is_settled(log, phase):
            yield f"{log.title} to confirm that its report is complete"


def _replaced(logs: Sequence[ProcessLog], seen: Observation) -> Iterator[str]:
    """Yields living processes that announced another program. If that is Python again, it begins a new event file."""
    latest: dict[int, int] = {}
    for name, log in seen.processes.items():
        latest[log.pid] = max(latest.get(log.pid, 0), _begun(name))
    for name, log in zip(seen.processes, logs, strict=True):
        last = log.events[-1] if log.events else None
        is_replaced = last is not None and last.kind == "bye" and last.text("why") == "exec"
        if is_replaced and log.pid in seen.alive and _begun(name) == latest[log.pid]:
            yield f"{log.title} to report what it has become"


def _begun(name: str) -> int:
    """Returns when an event file was begun, from its name; see `aotgaudi.wrap.events`."""
    digits = name.partition("-")[2].partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _absent(logs: Sequence[ProcessLog], expected: Expected) -> Iterator[str]:
    roles = Counter(log.role for log in logs)
    for role, number in expected.roles.items():
        if roles[role] < number:
            yield f"an agent in {number - roles[role]} of {number} {role} processes"
    for log in _workers(logs, expected):
        waiting = [hook for hook in expected.hooks if log.hooks.get(hook) is not True]
        if waiting:
            yield f"{log.title} to watch {', '.join(waiting)}"


def _workers(logs: Sequence[ProcessLog], expected: Expected) -> list[ProcessLog]:
    """Returns the processes that load compiled code. Others may never import what is hooked."""
    role = next((role for role in _WORKERS if role in expected.roles), None)
    return [log for log in logs if log.role == role]


def _of_loads(logs: Sequence[ProcessLog], expected: Expected) -> Iterator[Reason]:
    loads: Counter[str] = Counter()
    for log in logs:
        loads.update(_without_recipes(log.loads))
    needed = _without_recipes(expected.loads)
    wanted = sum(needed.values())
    for name, number in needed.items():
        if loads[name] != number:
            have = sum(min(loads[other], times) for other, times in needed.items())
            yield Reason(
                f"{name} was {_times(loads[name])}, in the build it was {_times(number)}"
                f" ({have} of {wanted} artifacts loaded)"
            )
    for name in sorted(loads.keys() - needed.keys()):
        yield Reason(f"{name} was loaded, which did not happen in the build")


def _without_recipes(loads: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the loads that do not depend on which requests met in a batch.

    The recipes of a Gaudi that a start finds do depend on it. The bridge counts and compiles a missing recipe.
    """
    return {name: number for name, number in loads.items() if not name.startswith("recipe:")}


def _of_counters(logs: Sequence[ProcessLog], expected: Expected) -> Iterator[Reason]:
    counters: Counter[str] = Counter()
    for log in logs:
        counters.update(log.counters)
    for name, number in expected.counters.items():
        if counters[name] != number:
            yield Reason(f"the server's own counter {name} is {counters[name]}, the build saw {number}")


def _of_answers(seen: Observation, expected: Expected) -> Iterator[Reason]:
    if seen.answers is None:
        return
    if len(seen.answers) != len(expected.answers):
        yield Reason(
            f"{len(seen.answers)} warm-up requests were answered, the build sent {len(expected.answers)}"
        )
    for index, (got, wanted) in enumerate(zip(seen.answers, expected.answers, strict=False)):
        if wanted and wanted not in got:
            yield Reason(f"warm-up request {index} was not answered as in the build")


def _times(number: int) -> str:
    return {0: "not loaded", 1: "loaded once"}.get(number, f"loaded {number} times")
