"""The steps of a phase as a plane, cut into cells that fit a page. Counts are exact, however many steps there are.

======  ==================  =======================  ==============================
phase   x                   y                        a step that is counted
======  ==================  =======================  ==============================
prompt  context blocks      rows of queries          a cell of ``bucketing/proof.py``
decode  sequences           blocks in all            (batch size, total of blocks)
======  ==================  =======================  ==============================

Bins end at powers of two, and at equal parts between two of them, so that the edges of most public buckets are edges of
bins. Counts are differences of the sums that the proof itself uses, so the cells of a plane add up to the numbers of the
proof. Padding is a mean over a few steps of each cell, which are the points of a grid in it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import (
    Measure,
    Padding,
    decode_measure,
    decode_padding,
    prompt_measure,
    prompt_padding,
)
from aotgaudi.bucketing.proof import DecodeHole, PromptHole, decode_holes, prompt_holes
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.report.values import Axis, EntryPoint, MeanPadding, Origin, Plane, PlaneCell, Traffic

MAX_BINS = 48
"""The most bins of an axis."""

MAX_POINTS = 1500
"""If there are more sizes of entries, they are counted by cell and not shown one by one."""

_SAMPLES = 3
"""How many steps of a cell are measured in each dimension, if it has as many."""

_PROMPT_SIZES = attrgetter("num_ctx_blocks"), attrgetter("query_len")
_DECODE_SIZES = attrgetter("batch_size"), attrgetter("num_blocks")

Span = tuple[int, int]
_Count = Callable[[Span, Span], int]
_HoleT = TypeVar("_HoleT")
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """Further facts about an entry in a report."""

    origin: Origin
    is_warm: bool | None


Facts = Callable[[PromptEntry | DecodeEntry], EntryFacts]


@dataclass(frozen=True, slots=True)
class _Phase:
    """How steps of a phase are counted, measured and placed. Spans are ranges of integers that include both ends.

    `uncovered` counts steps without an entry, `not_built` steps without a built entry.
    """

    reachable: _Count
    uncovered: _Count
    not_built: _Count | None
    some_step: Callable[[Span, Span], Place]
    has_step: Callable[[Place], bool]
    measure: Measure


def prompt_plane(
    prompts: ReachablePrompts,
    table: BucketTable,
    facts: Facts,
    traffic: Mapping[Place, Traffic],
    built: BucketTable | None = None,
) -> Plane:
    """Returns the plane of the prompts. `traffic` is by (context blocks, row). `built` is None if it is unknown."""
    holes, size = tuple(prompt_holes(prompts, table)), prompts.limits.block_size
    unbuilt = None if built is None else tuple(prompt_holes(prompts, built))
    contexts, queries = ([get(entry) for entry in table.prompt] for get in _PROMPT_SIZES)
    x = axis_of("context block", 0, max(prompts.max_ctx_blocks, *contexts, 0))
    y = axis_of("query token", 1, max(prompts.num_rows, prompts.row_of(max(queries, default=1))), size)
    row_of = {query: prompts.row_of(query) for query in set(queries)}
    phase = _Phase(
        reachable=lambda xs, ys: _rows(prompts, xs, ys),
        uncovered=_counted(holes, _in_prompt_hole),
        not_built=None if unbuilt is None else _counted(unbuilt, _in_prompt_hole),
        some_step=lambda xs, ys: (xs[0], ys[0]),
        has_step=lambda step: prompts.cells_in_rows(step[1], step[0], step[0]) == step[1],
        measure=prompt_measure(prompts, table),
    )
    points = ((entry.num_ctx_blocks, entry.query_len / size, facts(entry)) for entry in table.prompt)
    return Plane(
        phase="prompt",
        x=x,
        y=y,
        cells=tuple(_cells(phase, x, y, binned(x, y, contexts, queries, row_of), _by_bin(x, y, traffic))),
        points=_points(points, len(table.prompt)),
        witnesses=tuple((hole.smallest.shape[2], hole.smallest.shape[1] / size) for hole in holes),
        padding=_mean_padding(prompt_padding(prompts, table)),
        traffic=_sum(traffic.values()),
    )


def decode_plane(
    decodes: ReachableDecodes,
    table: BucketTable,
    facts: Facts,
    traffic: Mapping[Place, Traffic],
    built: BucketTable | None = None,
) -> Plane:
    """Returns the plane of the decodes. `traffic` is by (batch size, blocks). `built` is None if it is unknown."""
    holes = tuple(decode_holes(decodes, table))
    unbuilt = None if built is None else tuple(decode_holes(decodes, built))
    batches, totals = ([get(entry) for entry in table.decode] for get in _DECODE_SIZES)
    x = axis_of("sequence", 1, max(decodes.max_batch_size, *batches, 1))
    y = axis_of("block", 1, max(decodes.most_blocks(decodes.max_batch_size), *totals, 1))
    phase = _Phase(
        reachable=lambda xs, ys: _totals(decodes, xs, ys),
        uncovered=_counted(holes, _in_decode_hole),
        not_built=None if unbuilt is None else _counted(unbuilt, _in_decode_hole),
        some_step=lambda xs, ys: (min(xs[1], ys[1]), max(ys[0], min(xs[1], ys[1]))),
        has_step=lambda step: step[0] <= step[1] <= decodes.most_blocks(step[0]),
        measure=decode_measure(table),
    )
    points = ((entry.batch_size, float(entry.num_blocks), facts(entry)) for entry in table.decode)
    return Plane(
        phase="decode",
        x=x,
        y=y,
        cells=tuple(_cells(phase, x, y, binned(x, y, batches, totals), _by_bin(x, y, traffic))),
        points=_points(points, len(table.decode)),
        witnesses=tuple((hole.smallest.shape[0], float(hole.smallest.shape[2])) for hole in holes),
        padding=_mean_padding(decode_padding(decodes, table)),
        traffic=_sum(traffic.values()),
    )


def bin_of(axis: Axis, value: int) -> int:
    """Returns the bin that holds a value of the axis."""
    return bisect_right(axis.firsts, value) - 1


# Bins


def axis_of(noun: str, first: int, last: int, scale: int = 1) -> Axis:
    """Returns the finest axis of at most `MAX_BINS` bins over ``first..last``."""
    parts = (1 << power for power in range(16, -1, -1))
    firsts = next(found for part in parts if len(found := _firsts(first, last, part)) <= MAX_BINS)
    return Axis(noun=noun, firsts=firsts, last=last, scale=scale)


def _firsts(first: int, last: int, parts: int) -> tuple[int, ...]:
    """Returns the first values of bins that end at powers of two and, between two of these, at `parts` equal parts.

    Stops at one more bin than an axis may have.
    """
    firsts = [first]
    for end in _ends(parts):
        if end >= last or len(firsts) > MAX_BINS:
            return tuple(firsts)
        if end >= first:
            firsts.append(end + 1)
    raise AssertionError("the ends have no end")


def _ends(parts: int) -> Iterator[int]:
    yield 0
    yield 1
    for power in itertools.count():
        step = max(1, (1 << power) // parts)
        yield from range((1 << power) + step, (2 << power) + 1, step)


def binned(
    x: Axis, y: Axis, xs: Iterable[int], ys: Iterable[int], value_of: Mapping[int, int] | None = None
) -> Counter[Place]:
    """Returns how many of the pairs of `xs` and `ys` lie in each cell. `value_of` maps y to its value on the axis.

    Each distinct value is looked up only once, since there may be a million pairs.
    """
    xs, ys = list(xs), list(ys)
    columns = {value: bin_of(x, value) for value in set(xs)}
    rows = {value: bin_of(y, value_of[value] if value_of else value) for value in set(ys)}
    return Counter(zip(map(columns.__getitem__, xs), map(rows.__getitem__, ys), strict=True))


def _by_bin(x: Axis, y: Axis, traffic: Mapping[Place, Traffic]) -> dict[Place, Traffic]:
    groups: dict[Place, list[Traffic]] = {}
    for (a, b), one in traffic.items():
        groups.setdefault((bin_of(x, min(a, x.last)), bin_of(y, min(b, y.last))), []).append(one)
    return {place: found for place, group in groups.items() if (found := _sum(group))}


def _sum(traffic: Iterable[Traffic]) -> Traffic | None:
    rows = tuple(traffic)
    if not rows:
        return None
    return Traffic(
        num_steps=sum(row.num_steps for row in rows),
        useful=round(sum(row.useful for row in rows), 6),
        padded=round(sum(row.padded for row in rows), 6),
        share=round(sum(row.share for row in rows), 6),
    )


# Cells


def _cells(
    phase: _Phase, x: Axis, y: Axis, num_entries: Mapping[Place, int], traffic: Mapping[Place, Traffic]
) -> Iterator[PlaneCell]:
    """Yields the cells that hold a step, an entry or traffic."""
    for place in itertools.product(range(len(x.firsts)), range(len(y.firsts))):
        xs, ys = x.bounds(place[0]), y.bounds(place[1])
        num_steps, num_here = phase.reachable(xs, ys), num_entries.get(place, 0)
        num_uncovered = phase.uncovered(xs, ys) if num_steps else 0
        if num_steps or num_here or place in traffic:
            yield PlaneCell(
                x=place[0],
                y=place[1],
                num_steps=num_steps,
                num_uncovered=num_uncovered,
                padding=_sampled(phase, xs, ys) if num_steps else None,
                num_entries=num_here,
                traffic=traffic.get(place),
                num_cold=None if phase.not_built is None else phase.not_built(xs, ys) - num_uncovered,
            )


def _sampled(phase: _Phase, xs: Span, ys: Span) -> float | None:
    """Returns the mean padding of some steps of a cell that holds steps; None if no entry covers any of them."""
    grid = itertools.product(_spaced(*xs), _spaced(*ys))
    steps = {phase.some_step(xs, ys), *filter(phase.has_step, grid)}
    factors = [found[0] for found in map(phase.measure, sorted(steps)) if found is not None]
    return round(sum(factors) / len(factors), 4) if factors else None


def _spaced(first: int, last: int) -> Sequence[int]:
    if last - first < _SAMPLES:
        return range(first, last + 1)
    return [first + (last - first) * index // (_SAMPLES - 1) for index in range(_SAMPLES)]


def _rows(prompts: ReachablePrompts, xs: Span, ys: Span) -> int:
    return prompts.cells_in_rows(ys[1], *xs) - prompts.cells_in_rows(ys[0] - 1, *xs)


def _counted(holes: Sequence[_HoleT], in_hole: Callable[[_HoleT, Span, Span], int]) -> _Count:
    """Returns a function that counts the steps of a span that are in any of these holes."""
    return lambda xs, ys: sum(in_hole(hole, xs, ys) for hole in holes)


def _in_prompt_hole(hole: PromptHole, xs: Span, ys: Span) -> int:
    contexts = max(xs[0], hole.first_ctx_blocks), min(xs[1], hole.last_ctx_blocks)
    covered_rows = hole.covered_len // hole.reachable.limits.block_size
    if contexts[0] > contexts[1] or covered_rows >= ys[1]:
        return 0
    return _rows(hole.reachable, contexts, (max(ys[0], covered_rows + 1), ys[1]))


def _totals(decodes: ReachableDecodes, xs: Span, ys: Span) -> int:
    batches = xs[0], min(xs[1], decodes.max_batch_size)
    if batches[0] > batches[1]:
        return 0
    return decodes.steps_above(ys[0] - 1, *batches) - decodes.steps_above(ys[1], *batches)


def _in_decode_hole(hole: DecodeHole, xs: Span, ys: Span) -> int:
    batches = max(xs[0], hole.first_batch_size), min(xs[1], hole.last_batch_size)
    if batches[0] > batches[1] or hole.covered_blocks >= ys[1]:
        return 0
    return _totals(hole.reachable, batches, (max(ys[0], hole.covered_blocks + 1), ys[1]))


# Entries


def _points(rows: Iterable[tuple[int, float, EntryFacts]], num_rows: int) -> tuple[EntryPoint, ...]:
    """Returns a point for the entries of each size, origin and state; none at all if there would be too many."""
    if num_rows > 8 * MAX_POINTS:
        return ()
    counted = Counter(rows)
    if len(counted) > MAX_POINTS:
        return ()
    return tuple(
        EntryPoint(x=x, y=y, num_entries=number, origin=facts.origin, is_warm=facts.is_warm)
        for (x, y, facts), number in sorted(counted.items(), key=lambda item: item[0][:2])
    )


def _mean_padding(padding: Padding | None) -> MeanPadding | None:
    if padding is None:
        return None
    return MeanPadding(
        mean=round(padding.mean, 4),
        error=round(padding.error, 4),
        worst=round(padding.worst, 4),
        worst_step=padding.worst_step,
        is_sampled=padding.is_sampled,
    )
