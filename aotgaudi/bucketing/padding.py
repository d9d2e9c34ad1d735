"""How much padding a table costs: mean and worst factor over the steps that can be formed and are covered.

======  ====================================================  ===========================================
phase   a step's own size                                     what its entry computes and reads
======  ====================================================  ===========================================
prompt  longest query of the cell + context blocks * B        batch * (query_len + num_ctx_blocks * B)
decode  blocks                                                num_blocks
======  ====================================================  ===========================================

The factor of a step is the second divided by the first. The entry is the one that the engine's look-up takes (least padded
cost, ``bucketing/lookup.py``). Every cell, or (batch size, total of blocks), counts once. A cell counts with its longest
query. Shorter ones are also padded to whole blocks.

Up to `MAX_STEPS` steps are all measured. If there are more, `MAX_STEPS` of them are measured, spread evenly by a
low-discrepancy sequence, the same ones each time. The mean's error is then given as two standard errors of a random
sample of that size. An evenly spread sample stays below it in practice. The worst factor occurs at the smallest step that
an entry serves, so up to `MAX_STEPS` of those corners are measured too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from math import sqrt
from typing import Union

from aotgaudi.bucketing.lookup import BucketTable, prompt_cost
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import PromptEntry

MAX_STEPS = 1024
"""The most steps that are measured per phase, which takes some hundredths of a second."""

_STRIDES = (0.7548776662466927, 0.5698402909980532)
"""The steps of the two-dimensional additive sequence of least discrepancy: powers of the root of x**3 = x + 1."""

Shape = tuple[int, int, int]

Measure = Callable[[tuple[int, int]], Union[tuple[float, Shape], None]]
"""Maps a step to its factor and its shape; to None if no entry covers it."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding factors of one phase, 1 or more, over `num_steps` steps.

    The mean of all steps is within `error` of `mean`. `error` is 0 if all steps were measured. `worst_step` is a step of the
    worst factor: (1, query length, context blocks), or (batch size, 1, blocks).
    """

    mean: float
    error: float
    worst: float
    worst_step: Shape
    num_steps: int

    @property
    def is_sampled(self) -> bool:
        """Whether steps were left out."""
        return self.error > 0


def prompt_padding(
    prompts: ReachablePrompts, table: BucketTable, *, max_steps: int = MAX_STEPS
) -> Padding | None:
    """Returns the padding of the covered prompt cells; None if none is covered."""
    measured = prompt_measure(prompts, table)

    is_sampled = prompts.num_cells > max_steps
    sample = _prompt_cells(prompts, max_steps)
    rows = {1, *(prompts.row_of(entry.query_len + 1) for entry in table.prompt)}
    contexts = {0, *(entry.num_ctx_blocks + 1 for entry in table.prompt)}
    corners = (
        (context, row)
        for context, row in _thinned(contexts, rows, max_steps)
        if context <= prompts.max_ctx_blocks and row <= prompts.row_of(prompts.longest_query(context))
    )
    return _summary(map(measured, sample), map(measured, corners), is_sampled)


def decode_padding(
    decodes: ReachableDecodes, table: BucketTable, *, max_steps: int = MAX_STEPS
) -> Padding | None:
    """Returns the padding of the covered decode steps; None if none is covered."""
    measured = decode_measure(table)

    most, is_sampled = decodes.max_batch_size, decodes.num_steps > max_steps
    sample = _decode_steps(decodes, max_steps)
    batches = {1, *(entry.batch_size + 1 for entry in table.decode)}
    totals = {1, *(entry.num_blocks + 1 for entry in table.decode)}
    corners = (
        (batch, max(batch, blocks))
        for batch, blocks in _thinned(batches, totals, max_steps)
        if batch <= most and blocks <= decodes.most_blocks(batch)
    )
    return _summary(map(measured, sample), map(measured, corners), is_sampled)


def prompt_measure(prompts: ReachablePrompts, table: BucketTable) -> Measure:
    """Returns a function that measures the longest step of a prompt cell (context blocks, row)."""
    lookup, size = _PromptLookup(table.prompt), prompts.limits.block_size

    def measured(cell: tuple[int, int]) -> tuple[float, Shape] | None:
        context, row = cell
        query_len = min(prompts.row_query(row), prompts.longest_query(context))
        entry = lookup.find(query_len, context)
        if entry is None:
            return None
        padded = entry.batch_size * (entry.query_len + entry.num_ctx_blocks * size)
        return padded / (query_len + context * size), (1, query_len, context)

    return measured


def decode_measure(table: BucketTable) -> Measure:
    """Returns a function that measures a decode step (batch size, total of blocks)."""
    widest: dict[int, int] = {}
    for entry in table.decode:
        widest[entry.num_blocks] = max(entry.batch_size, widest.get(entry.num_blocks, 0))
    sizes = sorted(widest)

    def measured(step: tuple[int, int]) -> tuple[float, Shape] | None:
        batch_size, blocks = step
        larger = (sizes[index] for index in range(bisect_left(sizes, blocks), len(sizes)))
        padded = next((size for size in larger if widest[size] >= batch_size), None)
        return None if padded is None else (padded / blocks, (batch_size, 1, blocks))

    return measured


def _prompt_cells(prompts: ReachablePrompts, most: int) -> Iterator[tuple[int, int]]:
    """Yields (context blocks, row) of all cells, or of `most`, spread evenly and the same each time."""

    def num_rows(context: int) -> int:
        return prompts.row_of(prompts.longest_query(context))

    columns, is_sampled = range(prompts.max_ctx_blocks + 1), prompts.num_cells > most
    cells = _spread(num_rows, columns, prompts.num_rows, most) if is_sampled else _all(num_rows, columns)
    return ((context, place + 1) for context, place in cells)


def _decode_steps(decodes: ReachableDecodes, most: int) -> Iterator[tuple[int, int]]:
    """Yields (batch size, total of blocks) of all decode steps, or of `most`, like `_prompt_cells`."""

    def num_totals(batch_size: int) -> int:
        return decodes.most_blocks(batch_size) - batch_size + 1

    largest = decodes.max_batch_size
    columns, is_sampled = range(1, largest + 1), decodes.num_steps > most
    fullest = num_totals(min(largest, decodes.smallest_batch(decodes.limits.num_blocks)))
    steps = _spread(num_totals, columns, fullest, most) if is_sampled else _all(num_totals, columns)
    return ((batch, batch + place) for batch, place in steps)


def _all(count: Callable[[int], int], columns: range) -> Iterator[tuple[int, int]]:
    """Yields (x, place): ``0 <= place < count(x)`` for every column x."""
    return ((x, place) for x in columns for place in range(count(x)))


def _spread(
    count: Callable[[int], int], columns: range, most_count: int, most: int
) -> Iterator[tuple[int, int]]:
    """Yields `most` of the pairs of `_all`, spread evenly. `count` is concave and nowhere above `most_count`.

    So the pairs are at least about half of the rectangle's points.
    """
    points = ((number * _STRIDES[0] % 1, number * _STRIDES[1] % 1) for number in itertools.count(1))
    places = ((columns[int(x * len(columns))], int(y * most_count)) for x, y in points)
    return islice((place for place in places if place[1] < count(place[0])), most)


def _thinned(xs: Iterable[int], ys: Iterable[int], most: int) -> Iterator[tuple[int, int]]:
    """Yields the pairs of some numbers, or about `most` of them, including the smallest."""
    columns = [sorted(xs), sorted(ys)]
    while len(columns[0]) * len(columns[1]) > most:
        longer = max(columns, key=len)
        del longer[1::2]
    yield from product(*columns)


def _summary(
    sample: Iterable[tuple[float, Shape] | None],
    corners: Iterable[tuple[float, Shape] | None],
    is_sampled: bool,
) -> Padding | None:
    covered = [step for step in sample if step is not None]
    if not covered:
        return None
    factors = [factor for factor, _ in covered]
    mean = sum(factors) / len(factors)
    variance = sum((factor - mean) ** 2 for factor in factors) / len(factors)
    error = 2 * sqrt(variance / len(factors)) if is_sampled else 0.0
    worst, worst_step = max(
        (*covered, *(step for step in corners if step is not None)), key=lambda step: step[0]
    )
    return Padding(mean, error, worst, worst_step, len(covered))


class _PromptLookup:
    """`BucketTable.find_prompt` for one sequence, without an index over a million entries."""

    def __init__(self, entries: Iterable[PromptEntry]) -> None:
        groups: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            groups[entry.batch_size * entry.query_len][entry.batch_size].append(entry.num_ctx_blocks)
        self._tokens = sorted(groups)  # The look-up compares these first.
        self._groups = [
            [(batch_size, sorted(contexts)) for batch_size, contexts in groups[tokens].items()]
            for tokens in self._tokens
        ]

    def find(self, query_len: int, num_ctx_blocks: int) -> PromptEntry | None:
        """Returns the covering entry of least cost, or None."""
        for index in range(bisect_left(self._tokens, query_len), len(self._tokens)):
            tokens = self._tokens[index]
            covering = [
                PromptEntry(batch_size, tokens // batch_size, contexts[bisect_left(contexts, num_ctx_blocks)])
                for batch_size, contexts in self._groups[index]
                if tokens // batch_size >= query_len and contexts[-1] >= num_ctx_blocks
            ]
            if covering:
                return min(covering, key=prompt_cost)
        return None
