"""What an event means for warmth: nothing, or a finding. One table, for the verdict before ready and the counts after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from aotgaudi.wrap.watch.events import Event
from aotgaudi.wrap.watch.files import FileRules

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
