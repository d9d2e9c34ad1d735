"""Findings of ``aotgaudi.compile.why`` as lines for people, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from aotgaudi.cli.show import counted
from aotgaudi.compile.why import ENTRY, BuiltProgram, BuiltUnit, Change, Cost, Finding, History, Reason
from aotgaudi.errors import shortened

_SHOWN_CHARACTERS = 72
_EXAMPLES = 3
_INDENT = "    "
_LISTS = frozenset({"target.isa"})
"""Components that are lists of words: only the words that differ are shown."""

NOT_COMPILED = "traced, and not compiled yet"


def reason_lines(reason: Reason, history: History) -> Iterator[str]:
    """Yields a headline, then, indented, what differs and what that costs."""
    first = reason.findings[0]
    yield f"{_counted(reason)}, e.g. {first.label}: {_state(first)}"
    for change in first.changes:
        yield f"{_INDENT}{change_text(change)}"
    if first.lines is not None:
        yield f"{_INDENT}first line that differs: {_shortened(first.lines[0] or '(none)')}"
        yield f"{_INDENT}{'now:':>24} {_shortened(first.lines[1] or '(none)')}"
    cost = reason.cost(history)
    if cost.num_units:
        yield f"{_INDENT}{_cost_text(reason, cost)}"


def reason_document(reason: Reason, history: History) -> dict[str, Any]:
    """Returns the same as a JSON value, with nothing shortened."""
    first = reason.findings[0]
    return {
        "of": "program" if first.is_program else "unit",
        "state": first.state,
        "num_programs": len(reason.findings) if first.is_program else 0,
        "num_entries": reason.num_entries,
        "num_units": 0 if first.is_program else len(reason.findings),
        "examples": [finding.label for finding in reason.findings[:_EXAMPLES]],
        "keys": [finding.key.hex for finding in reason.findings],
        "nearest": _nearest(first),
        "changes": changes_document(first.changes),
        "graph_lines": first.lines,
        "invalidated": cost_document(reason.cost(history), is_certain=reason.is_certain),
    }


def cost_document(cost: Cost, *, is_certain: bool) -> dict[str, Any]:
    """Returns a cost as a JSON value. `is_certain`: the units are compiled again whatever tracing finds."""
    return {
        "num_units": cost.num_units,
        "seconds": cost.seconds,
        "num_units_without_time": cost.num_untimed,
        "certain": is_certain,
    }


def changes_document(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Returns changes as JSON values."""
    return [{"component": change.name, "old": change.old, "new": change.new} for change in changes]


def change_text(change: Change) -> str:
    """Returns ``name: old -> new``; for a list of words, the words that went and those that came."""
    if change.name in _LISTS and change.old is not None and change.new is not None:
        old, new = change.old.split(), change.new.split()
        words = [*(f"-{w}" for w in old if w not in new), *(f"+{w}" for w in new if w not in old)]
        return f"{change.name}: {' '.join(words)}"
    return f"{change.name}: {_value(change.old)} -> {_value(change.new)}"


def time_text(cost: Cost) -> str:
    """Returns what compiling took, in words."""
    if cost.num_untimed == cost.num_units:
        return "how long they took is not on record"
    others = f" ({cost.num_untimed} of them not on record)" if cost.num_untimed else ""
    return f"which took {cost.seconds:.1f} s{others}"


def _counted(reason: Reason) -> str:
    if not reason.findings[0].is_program:
        return counted(len(reason.findings), "unit")
    return f"{counted(len(reason.findings), 'program')} ({counted(reason.num_entries, 'entry')})"


def _state(finding: Finding) -> str:
    if finding.state == "lost":
        return "built before, but what its record names is gone (aotgaudi cache fsck)"
    if finding.state == "never built":
        return f"never built, nor anything like it{'' if finding.is_program else ' (' + NOT_COMPILED + ')'}"
    if finding.state == "new":
        return f"never built; the nearest is {_nearest(finding)}"
    return "not built since these changed" if finding.is_program else f"{NOT_COMPILED} since these changed"


def _cost_text(reason: Reason, cost: Cost) -> str:
    units, took = counted(cost.num_units, "unit"), time_text(cost)
    if not reason.findings[0].is_program:
        return f"{units} to compile; the nearest took {cost.seconds:.1f} s"
    if reason.state == "new":
        return f"{units} at most; those of the nearest, counted for each, {took.removeprefix('which ')}"
    if reason.is_certain or reason.state == "lost":
        return f"{units} to compile again, {took}"
    return f"{units} at most, compiled again where their graphs come out differently, {took}"


def _nearest(finding: Finding) -> str | None:
    if isinstance(finding.nearest, BuiltUnit):
        return finding.nearest.label
    if isinstance(finding.nearest, BuiltProgram):
        names = [name for name, _ in finding.key.components if name.startswith(ENTRY)]
        return f"({', '.join(finding.nearest.components.get(name, '?') for name in names)})"
    return None


def _value(text: str | None) -> str:
    return "(absent)" if text is None else _shortened(text)


def _shortened(text: str) -> str:
    return shortened(" ".join(text.split()), _SHOWN_CHARACTERS)
