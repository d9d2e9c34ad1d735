"""The steps of a phase as a heat map, cut into cells that fit a page. Counts are exact, however many steps there are.

======  ==================  =======================  ==============================
phase   x                   y                        a step that is counted
======  ==================  =======================  ==============================
prompt  context blocks      rows of queries          a cell of ``bucketing/proof.py``
decode  sequences           blocks in all            (batch size, total of blocks)
======  ==================  =======================  ==============================

Bins end at powers of two, and at equal parts between two of them, so that the edges of most public buckets are edges of
bins. Counts are differences of the sums that the proof itself uses, so the cells of a map add up to the numbers of the
proof. Padding is that of a trace's steps or, without a trace, a mean over a few steps of each cell, which form a grid.

Work is counted as in ``traffic/cost.py``. *Useful* work is that of the smallest shape that a step needs, *padded* work that
of the entry that it ran in.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import Measure, decode_measure, prompt_measure
from aotgaudi.bucketing.proof import DecodeHole, PromptHole, decode_holes, prompt_holes
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry

MAX_BINS = 48
"""The most bins of an axis."""

MAX_BUCKETS = 1500
"""If there are more sizes of buckets, none is shown."""

_SAMPLES = 3
"""How many steps of a cell are measured in each dimension, if it has as many."""

E = TypeVar("E", bound=Entry)
Span = tuple[int, int]
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension, cut into bins. Bin i begins at `firsts[i]` and ends before the next, the last at `last`.

    A value stands for `scale` of `noun`.
    """

    noun: str
    firsts: tuple[int, ...]
    last: int
    scale: int = 1

    def bounds(self, index: int) -> Span:
        """Returns the first and last value of a bin."""
        following = self.firsts[index + 1] - 1 if index + 1 < len(self.firsts) else self.last
        return self.firsts[index], following

    def bin_of(self, value: int) -> int:
        """Returns the bin that holds a value."""
        return bisect_right(self.firsts, value) - 1


@dataclass(frozen=True, slots=True)
class Use:
    """Some steps of a trace, and their work."""

    num_steps: int = 0
    useful: int = 0
    padded: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.num_steps + other.num_steps, self.useful + other.useful, self.padded + other.padded)

    @property
    def factor(self) -> float | None:
        """The padded work by the useful work; None without any."""
        return round(self.padded / self.useful, 4) if self.useful else None


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of both axes that holds steps: how many can be formed, and how many of these have no entry.

    `padding` is the mean factor, 1 or more, over the trace's `num_traced` steps in the cell, or None if there are none.
    Without a trace, `num_traced` is None, and the mean is over a sample of the cell's covered steps.
    """

    x: int
    y: int
    num_steps: int
    num_uncovered: int
    padding: float | None
    num_traced: int | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Entries of one size, apart from the batch. `x` and `y` are in the units of the axes. `is_built` None means unknown."""

    x: int
    y: float
    num_entries: int
    is_built: bool | None


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The steps of one phase: prompts by context and query, decodes by batch and blocks.

    `buckets` is empty if there would be too many.
    """

    phase: str
    x: Axis
    y: Axis
    cells: tuple[Cell, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class _Phase:
    """How steps of a phase are counted and measured. Spans are ranges of integers that include both ends."""

    reachable: Callable[[Span, Span], int]
    uncovered: Callable[[Span, Span], int]
    some_step: Callable[[Span, Span], Place]
    has_step: Callable[[Place], bool]
    measure: Measure


def prompt_map(
    prompts: ReachablePrompts,
    table: BucketTable,
    built: Collection[Entry] | None = None,
    traced: Mapping[Place, Use] | None = None,
) -> HeatMap:
    """Returns the map of the prompts. `built` is None if it is unknown. `traced` is by (context blocks, row)."""
    holes, size = tuple(prompt_holes(prompts, table)), prompts.limits.block_size
    longest = max((entry.query_len for entry in table.prompt), default=1)
    most = max(prompts.max_ctx_blocks, *(entry.num_ctx_blocks for entry in table.prompt), 0)
    x = axis_of("context block", 0, most)
    y = axis_of("query token", 1, max(prompts.num_rows, prompts.row_of(longest)), size)
    phase = _Phase(
        reachable=lambda xs, ys: _rows(prompts, xs, ys),
        uncovered=lambda xs, ys: sum(_in_prompt_hole(hole, xs, ys) for hole in holes),
        some_step=lambda xs, ys: (xs[0], ys[0]),
        has_step=lambda step: prompts.cells_in_rows(step[1], step[0], step[0]) == step[1],
        measure=prompt_measure(prompts, table),
    )

    def place_of(entry: PromptEntry) -> tuple[int, float]:
        return entry.num_ctx_blocks, entry.query_len / size

    return _heat_map("prompt", x, y, phase, table.prompt, place_of, built, traced)


def decode_map(
    decodes: ReachableDecodes,
    table: BucketTable,
    built: Collection[Entry] | None = None,
    traced: Mapping[Place, Use] | None = None,
) -> HeatMap:
    """Returns the map of the decodes. `built` is None if it is unknown. `traced` is by (batch size, blocks)."""
    holes, most = tuple(decode_holes(decodes, table)), decodes.max_batch_size
    x = axis_of("sequence", 1, max(most, *(entry.batch_size for entry in table.decode), 1))
    y = axis_of("block", 1, max(decodes.most_blocks(most), *(entry.num_blocks for entry in table.decode), 1))
    phase = _Phase(
        reachable=lambda xs, ys: _totals(decodes, xs, ys),
        uncovered=lambda xs, ys: sum(_in_decode_hole(hole, xs, ys) for hole in holes),
        some_step=lambda xs, ys: (min(xs[1], ys[1]), max(ys[0], min(xs[1], ys[1]))),
        has_step=lambda step: step[0] <= step[1] <= decodes.most_blocks(step[0]),
        measure=decode_measure(table),
    )

    def place_of(entry: DecodeEntry) -> tuple[int, float]:
        return entry.batch_size, float(entry.num_blocks)

    return _heat_map("decode", x, y, phase, table.decode, place_of, built, traced)


def _heat_map(
    kind: str,
    x: Axis,
    y: Axis,
    phase: _Phase,
    entries: Sequence[E],
    place_of: Callable[[E], tuple[int, float]],
    built: Collection[Entry] | None,
    traced: Mapping[Place, Use] | None,
) -> HeatMap:
    """Returns the map of a phase, whose table has `entries`. It shows no buckets if there would be too many."""
    counted: Counter[tuple[int, float, bool | None]] = Counter()
    if len(entries) <= 8 * MAX_BUCKETS:
        counted.update((*place_of(entry), None if built is None else entry in built) for entry in entries)
    rows = sorted(counted.items(), key=lambda item: item[0][:2]) if len(counted) <= MAX_BUCKETS else ()
    buckets = (Bucket(a, b, number, is_built) for (a, b, is_built), number in rows)
    return HeatMap(kind, x, y, tuple(_cells(phase, x, y, traced)), tuple(buckets))


# Bins


def axis_of(noun: str, first: int, last: int, scale: int = 1) -> Axis:
    """Returns the finest axis of at most `MAX_BINS` bins over ``first..last``."""
    parts = (1 << power for power in range(16, -1, -1))
    firsts = next(found for part in parts if len(found := _firsts(first, last, part)) <= MAX_BINS)
    return Axis(noun, firsts, last, scale)


def _firsts(first: int, last: int, parts: int) -> tuple[int, ...]:
    """Returns the first values of bins that end at powers of two and, between two of these, at `parts` equal parts.

    Stops at one more bin than an axis may have.
    """
    firsts = [first]
    for end in _ends(parts):
        if end >= last or len(firsts) > MAX_BINS:
            break
        if end >= first:
            firsts.append(end + 1)
    return tuple(firsts)


def _ends(parts: int) -> Iterator[int]:
    yield 0
    yield 1
    for power in itertools.count():
        step = max(1, (1 << power) // parts)
        yield from range((1 << power) + step, (2 << power) + 1, step)


# Cells


def _cells(phase: _Phase, x: Axis, y: Axis, traced: Mapping[Place, Use] | None) -> Iterator[Cell]:
    """Yields the cells that hold a step or traffic."""
    uses: defaultdict[Place, Use] = defaultdict(Use)
    for (a, b), use in (traced or {}).items():
        uses[x.bin_of(min(a, x.last)), y.bin_of(min(b, y.last))] += use
    for place in itertools.product(range(len(x.firsts)), range(len(y.firsts))):
        xs, ys = x.bounds(place[0]), y.bounds(place[1])
        num_steps, here = phase.reachable(xs, ys), uses[place]
        if num_steps or here.num_steps:
            yield Cell(
                *place,
                num_steps,
                num_uncovered=phase.uncovered(xs, ys) if num_steps else 0,
                padding=_sampled(phase, xs, ys) if traced is None else here.factor,
                num_traced=None if traced is None else here.num_steps,
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
