"""What differs between two specs, value by value, and a spec with one of its values changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aotgaudi.errors import shortened
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json

ABSENT = "(absent)"
"""Stands for the value of a key that one of two tables lacks: a key of the model's config, or one absent by default."""


@dataclass(frozen=True)
class ValueChange:
    """One changed value of a spec. `path`: the keys that lead to it; values are JSON values, or `ABSENT`."""

    path: tuple[str, ...]
    old: Any
    new: Any

    @property
    def where(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    def __str__(self) -> str:
        return f"{self.where}: {_shown(self.old)} -> {_shown(self.new)}"


def value_changes(old: BuildSpec, new: BuildSpec) -> tuple[ValueChange, ...]:
    """Returns every changed value, defaults included, in the order of the paths."""
    return tuple(_changes((), old.to_json(), new.to_json()))


def with_change(spec: BuildSpec, change: ValueChange) -> BuildSpec:
    """Returns `spec` with the new value of one change. Raises SpecError where the result contradicts itself."""
    value = spec.to_json()
    *tables, name = change.path
    table = value
    for part in tables:
        table = table[part]
    if change.new == ABSENT:
        table.pop(name, None)
    else:
        table[name] = change.new
    return spec_from_json(value)


def _changes(path: tuple[str, ...], old: Any, new: Any) -> Iterator[ValueChange]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _changes((*path, name), old.get(name, ABSENT), new.get(name, ABSENT))
    elif old != new or type(old) is not type(new):
        yield ValueChange(path, old, new)


def _shown(value: Any) -> str:
    return shortened(" ".join(str(value).split()))
