"""What differs between two manifests, and which changed value of the spec caused which entries.

The cause is found by experiment: the old spec is enumerated with each changed value alone. Entries that this adds or
removes, and that also differ in the new manifest, are attributed to that value. Entries that no single value explains are
attributed to several values together. Entries that the old spec itself no longer gives are attributed to other rules in this
version of aotgaudi.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from aotgaudi.entries import ENTRY_KINDS, Entry
from aotgaudi.errors import SpecError, shortened
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json

ABSENT = "(absent)"
"""Stands for the value of a key that one of two tables lacks: a key of the model's config, or one absent by default."""
OTHER_RULES = "(the rules of another version of aotgaudi)"
TOGETHER = "(several values together)"

_EXAMPLES = 3
_CONFIG = ("model", "config")


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


@dataclass(frozen=True)
class EntryChange:
    """Entries gained and lost, in manifest order."""

    added: tuple[Entry, ...] = ()
    removed: tuple[Entry, ...] = ()

    def of_kind(self, kind: str) -> EntryChange:
        """Returns the changes of one kind."""
        return self.filtered(lambda entry: entry.kind == kind, lambda entry: entry.kind == kind)

    def filtered(self, is_added: Callable[[Entry], bool], is_removed: Callable[[Entry], bool]) -> EntryChange:
        """Returns the added and the removed entries that meet a condition."""
        return EntryChange(
            tuple(entry for entry in self.added if is_added(entry)),
            tuple(entry for entry in self.removed if is_removed(entry)),
        )

    def counts(self) -> dict[str, tuple[int, int]]:
        """Returns how many entries were added and removed, for each kind that has any."""
        added, removed = (Counter(e.kind for e in entries) for entries in (self.added, self.removed))
        return {kind: (added[kind], removed[kind]) for kind in ENTRY_KINDS if added[kind] or removed[kind]}

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)

    def __str__(self) -> str:
        return " ".join(_listed("+", self.added) + _listed("-", self.removed))


@dataclass(frozen=True)
class Cause:
    """The effect of a changed value alone. `where`: its dotted path, `OTHER_RULES` or `TOGETHER`.

    `problem`: why the old spec cannot have the new value alone, so that its effect is unknown.
    """

    where: str
    effect: EntryChange
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.where}: cannot be changed alone: {self.problem}"
        return f"{self.where}: {counted(self.effect)}"


@dataclass(frozen=True)
class Difference:
    """All differences. `reordered`: kinds that have the same entries in another order."""

    values: tuple[ValueChange, ...]
    entries: EntryChange
    reordered: tuple[str, ...]
    causes: tuple[Cause, ...]

    def __bool__(self) -> bool:
        return bool(self.values or self.entries or self.reordered)

    def lines(self) -> Iterator[str]:
        """Yields a line for each changed value, for each kind that gained or lost, and for each cause."""
        yield from map(str, self.values)
        for kind in self.entries.counts():
            yield f"{kind} entries: {self.entries.of_kind(kind)}"
        for kind in self.reordered:
            yield f"{kind} entries: in another order"
        yield from (f"cause: {cause}" for cause in self.causes)


def difference(old: Manifest, new: Manifest) -> Difference:
    """Returns what differs. Enumerates the old spec once for each changed value."""
    values = value_changes(old.spec, new.spec)
    entries = _entry_change(old.entries, new.entries)
    return Difference(
        values=values,
        entries=entries,
        reordered=tuple(_reordered(old, new)),
        causes=tuple(_causes(old, new.spec, values, entries)) if entries else (),
    )


def examples(entries: tuple[Entry, ...]) -> tuple[str, ...]:
    """Returns the first few entries as text."""
    return tuple(map(str, entries[:_EXAMPLES]))


def counted(change: EntryChange) -> str:
    """Returns e.g. ``prompt +2 -1, decode +3``; nothing for no change."""
    return ", ".join(
        f"{kind}{f' +{added}' if added else ''}{f' -{removed}' if removed else ''}"
        for kind, (added, removed) in change.counts().items()
    )


def _listed(sign: str, entries: tuple[Entry, ...]) -> list[str]:
    if not entries:
        return []
    more = ["..."] if len(entries) > _EXAMPLES else []
    return [f"{sign}{len(entries)}", *examples(entries), *more]


def _entry_change(old: Iterable[Entry], new: Iterable[Entry]) -> EntryChange:
    before, after = dict.fromkeys(old), dict.fromkeys(new)
    return EntryChange(
        tuple(entry for entry in after if entry not in before),
        tuple(entry for entry in before if entry not in after),
    )


def _reordered(old: Manifest, new: Manifest) -> Iterator[str]:
    for kind in ENTRY_KINDS:
        before, after = old.of_kind(kind), new.of_kind(kind)
        if before != after and set(before) == set(after):
            yield kind


def _causes(
    old: Manifest, new: BuildSpec, values: tuple[ValueChange, ...], found: EntryChange
) -> Iterator[Cause]:
    """Yields the causes, with the unexplained rest last."""
    try:
        baseline = enumerate_entries(old.spec)
    except SpecError as error:
        yield Cause(OTHER_RULES, EntryChange(), str(error))
        return
    rules = Cause(OTHER_RULES, _common(_entry_change(old.entries, baseline), found))
    candidates = tuple(_candidates(old.spec, new, baseline, values))
    causes = [rules, *(_cause(old.spec, change, baseline, found) for change in candidates)]
    rest = _without(found, causes)
    if rest:
        causes.append(Cause(TOGETHER if values else OTHER_RULES, rest))
    yield from (cause for cause in causes if cause.effect or cause.problem)


def _candidates(
    old: BuildSpec, new: BuildSpec, baseline: tuple[Entry, ...], values: tuple[ValueChange, ...]
) -> Iterator[ValueChange]:
    """Yields the changes to try alone; those of the model's config only if its change as a whole has an effect."""
    in_config = [change for change in values if change.path[:2] == _CONFIG]
    whole = ValueChange(_CONFIG, old.model.config, new.model.config)
    if len(in_config) > 1 and entries_after(old, whole) == baseline:
        yield from (change for change in values if change not in in_config)
    else:
        yield from values


def entries_after(spec: BuildSpec, change: ValueChange) -> tuple[Entry, ...] | SpecError:
    """Returns the entries of `spec` with one change, or why the spec cannot have it."""
    try:
        return enumerate_entries(with_change(spec, change))
    except SpecError as error:
        return error


def _cause(spec: BuildSpec, change: ValueChange, baseline: tuple[Entry, ...], found: EntryChange) -> Cause:
    after = entries_after(spec, change)
    if isinstance(after, SpecError):
        return Cause(change.where, EntryChange(), str(after))
    return Cause(change.where, _common(_entry_change(baseline, after), found))


def _common(effect: EntryChange, found: EntryChange) -> EntryChange:
    return found.filtered(set(effect.added).__contains__, set(effect.removed).__contains__)


def _without(found: EntryChange, causes: Iterable[Cause]) -> EntryChange:
    added = {entry for cause in causes for entry in cause.effect.added}
    removed = {entry for cause in causes for entry in cause.effect.removed}
    return found.filtered(lambda entry: entry not in added, lambda entry: entry not in removed)
