"""What differs between two manifests, as a value: ``aotgaudi diff`` prints it, and ``--html`` shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from aotgaudi.document import Value
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.manifest.difference import Cause, Difference, EntryChange, examples
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.plane import axis_of, binned
from aotgaudi.report.report import Axis


class Side(Value):
    """One of the two: `path` as it was given."""

    path: str
    id: str
    num_entries: int


class ChangedValue(Value):
    """A value of the spec that differs, by its dotted path."""

    where: str
    old: Any
    new: Any


class KindChange(Value):
    """Entries of one kind that came and went, and the first few of each."""

    added: int
    removed: int
    added_examples: tuple[str, ...]
    removed_examples: tuple[str, ...]


class Moved(Value):
    """How many came and went."""

    added: int
    removed: int


class ReportedCause(Value):
    """What one changed value did alone, by kind of entry; `problem`: why that is not known."""

    where: str
    entries: dict[str, Moved]
    problem: str


class ChangedCell(Value):
    """The entries whose own size lies in one bin of both axes."""

    x: int
    y: int
    num_kept: int
    num_added: int
    num_removed: int


class ChangedPlane(Value):
    """The entries of both sides by size, but for the batch of prompts and the query of decodes."""

    phase: Literal["prompt", "decode"]
    x: Axis
    y: Axis
    cells: tuple[ChangedCell, ...]


class DifferenceReport(Value):
    """All that differs. `planes` are made for a page alone."""

    a: Side
    b: Side
    different: bool
    values: tuple[ChangedValue, ...]
    entries: dict[str, KindChange]
    reordered: tuple[str, ...]
    causes: tuple[ReportedCause, ...]
    planes: tuple[ChangedPlane, ...] = ()


def difference_report(
    found: Difference, old: tuple[str, Manifest], new: tuple[str, Manifest], *, with_planes: bool = False
) -> DifferenceReport:
    """Returns `found` as a value; `old` and `new` are what was compared, each with its path."""
    return DifferenceReport(
        a=_side(*old),
        b=_side(*new),
        different=bool(found),
        values=tuple(ChangedValue(where=c.where, old=c.old, new=c.new) for c in found.values),
        entries={kind: _kind(found.entries.of_kind(kind)) for kind in found.entries.counts()},
        reordered=found.reordered,
        causes=tuple(map(_cause, found.causes)),
        planes=_planes(found.entries, new[1]) if with_planes else (),
    )


def _side(path: str, manifest: Manifest) -> Side:
    return Side(path=path, id=manifest.id, num_entries=len(manifest.entries))


def _kind(change: EntryChange) -> KindChange:
    return KindChange(
        added=len(change.added),
        removed=len(change.removed),
        added_examples=examples(change.added),
        removed_examples=examples(change.removed),
    )


def _cause(cause: Cause) -> ReportedCause:
    counts = cause.effect.counts().items()
    moved = {kind: Moved(added=added, removed=removed) for kind, (added, removed) in counts}
    return ReportedCause(where=cause.where, entries=moved, problem=cause.problem)


_Phase = Literal["prompt", "decode"]


def _planes(change: EntryChange, new: Manifest) -> tuple[ChangedPlane, ...]:
    added = set(change.added)
    kept = [entry for entry in new.entries if entry not in added]
    phases: tuple[_Phase, ...] = ("prompt", "decode")
    planes = (_plane(phase, (kept, change.added, change.removed)) for phase in phases)
    return tuple(plane for plane in planes if plane is not None)


def _place(entry: Entry) -> tuple[int, int]:
    if isinstance(entry, PromptEntry):
        return entry.num_ctx_blocks, entry.query_len
    assert isinstance(entry, DecodeEntry)
    return entry.batch_size, entry.num_blocks


def _plane(phase: _Phase, groups: Iterable[Iterable[Entry]]) -> ChangedPlane | None:
    """The plane of three groups: those that were kept, came and went; None where none is of the phase."""
    sets = [[_place(entry) for entry in group if entry.kind == phase] for group in groups]
    every = [place for places in sets for place in places]
    if not every:
        return None
    is_prompt = phase == "prompt"
    x = axis_of("context block" if is_prompt else "sequence", 0 if is_prompt else 1, max(a for a, _ in every))
    y = axis_of("query token" if is_prompt else "block", 1, max(b for _, b in every))
    counts = [binned(x, y, (a for a, _ in places), (b for _, b in places)) for places in sets]
    return ChangedPlane(
        phase=phase,
        x=x,
        y=y,
        cells=tuple(
            ChangedCell(
                x=place[0],
                y=place[1],
                num_kept=counts[0][place],
                num_added=counts[1][place],
                num_removed=counts[2][place],
            )
            for place in sorted({place for count in counts for place in count})
        ),
    )
