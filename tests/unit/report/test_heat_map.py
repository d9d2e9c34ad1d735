"""Heat maps: the cells add up to the proof, whatever the limits and the table; and each one counts what a walk counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import prompt_measure
from aotgaudi.bucketing.proof import decode_holes, prompt_holes
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.report.heat_map import MAX_BINS, MAX_BUCKETS, Axis, Cell, HeatMap, Use, decode_map, prompt_map
from aotgaudi.spec.limits import ServingLimits

CONTEXTS = ("any", "blocks", "none")

Step = tuple[int, int]


@st.composite
def limits(draw: st.DrawFn) -> ServingLimits:
    block_size = draw(st.sampled_from((1, 4, 16, 128)))
    max_blocks = draw(st.integers(1, 300))
    model_len = max(2, max_blocks * block_size - draw(st.integers(0, block_size - 1)))
    return ServingLimits(
        max_num_seqs=draw(st.integers(1, 70)),
        max_num_batched_tokens=draw(st.integers(block_size, max(block_size, model_len))),
        max_model_len=model_len,
        block_size=block_size,
        num_blocks=draw(st.integers(-(-model_len // block_size), 400)),
    )


def prompt_entries(least: int = 0) -> st.SearchStrategy[tuple[PromptEntry, ...]]:
    entry = st.builds(PromptEntry, st.integers(1, 2), st.integers(1, 5000), st.integers(0, 310))
    return st.lists(entry, min_size=least, max_size=12, unique=True).map(tuple)


def decode_entries() -> st.SearchStrategy[tuple[DecodeEntry, ...]]:
    entry = st.builds(DecodeEntry, st.integers(1, 80), st.just(1), st.integers(1, 410))
    return st.lists(entry, max_size=12, unique=True).map(tuple)


def span_of(heat_map: HeatMap, name: str, index: int) -> range:
    axis: Axis = getattr(heat_map, name)
    first, last = axis.bounds(index)
    return range(first, last + 1)


@given(limits=limits(), entries=prompt_entries(), contexts=st.sampled_from(CONTEXTS))
def test_prompt_cells_add_up_to_the_proof(limits, entries, contexts) -> None:
    prompts, table = ReachablePrompts(limits, contexts), BucketTable(entries, ())

    heat_map = prompt_map(prompts, table)

    assert sum(cell.num_steps for cell in heat_map.cells) == prompts.num_cells
    uncovered = sum(hole.num_cells for hole in prompt_holes(prompts, table))
    assert sum(cell.num_uncovered for cell in heat_map.cells) == uncovered
    assert sum(bucket.num_entries for bucket in heat_map.buckets) == len(entries)
    assert max(len(heat_map.x.firsts), len(heat_map.y.firsts)) <= MAX_BINS


@given(limits=limits(), entries=decode_entries(), contiguous=st.booleans())
def test_decode_cells_add_up_to_the_proof(limits, entries, contiguous) -> None:
    decodes, table = ReachableDecodes(limits, contiguous), BucketTable((), entries)

    heat_map = decode_map(decodes, table)

    assert sum(cell.num_steps for cell in heat_map.cells) == decodes.num_steps
    uncovered = sum(hole.num_steps for hole in decode_holes(decodes, table))
    assert sum(cell.num_uncovered for cell in heat_map.cells) == uncovered


def walks(heat_map: HeatMap, is_step: Callable[[Step], bool]) -> Iterator[tuple[Cell, list[Step]]]:
    """Some of the cells, each with all of its steps."""
    for cell in heat_map.cells[:: max(1, len(heat_map.cells) // 20)]:
        yield (
            cell,
            list(filter(is_step, product(*(span_of(heat_map, name, getattr(cell, name)) for name in "xy")))),
        )


def require_walked(
    heat_map: HeatMap, is_step: Callable[[Step], bool], is_covered: Callable[[Step], bool]
) -> None:
    for cell, walked in walks(heat_map, is_step):
        lacking = [step for step in walked if not is_covered(step)]
        assert (cell.num_steps, cell.num_uncovered) == (len(walked), len(lacking))
        assert (cell.padding is None) <= bool(lacking or not walked)


def is_prompt(prompts: ReachablePrompts, step: Step) -> bool:
    return step[0] <= prompts.max_ctx_blocks and 0 < step[1] <= prompts.row_of(prompts.longest_query(step[0]))


@given(limits=limits(), entries=prompt_entries(1))
def test_a_prompt_cell_counts_what_a_walk_over_it_counts(limits, entries) -> None:
    prompts = ReachablePrompts(limits)

    def is_covered(step: Step) -> bool:
        query_len = min(prompts.row_query(step[1]), prompts.longest_query(step[0]))
        return any(entry.num_ctx_blocks >= step[0] and entry.query_len >= query_len for entry in entries)

    heat_map = prompt_map(prompts, BucketTable(entries, ()))

    require_walked(heat_map, partial(is_prompt, prompts), is_covered)


@given(limits=limits(), entries=decode_entries(), contiguous=st.booleans())
def test_a_decode_cell_counts_what_a_walk_over_it_counts(limits, entries, contiguous) -> None:
    decodes = ReachableDecodes(limits, contiguous)

    heat_map = decode_map(decodes, BucketTable((), entries))

    require_walked(
        heat_map,
        lambda step: step[0] <= decodes.max_batch_size and step[0] <= step[1] <= decodes.most_blocks(step[0]),
        lambda step: any(entry.batch_size >= step[0] and entry.num_blocks >= step[1] for entry in entries),
    )


@given(limits=limits(), entries=prompt_entries(1))
def test_padding_of_a_cell_is_between_one_and_the_worst(limits, entries) -> None:
    prompts, table = ReachablePrompts(limits), BucketTable(entries, ())
    measure = prompt_measure(prompts, table)

    for cell, walked in walks(prompt_map(prompts, table), partial(is_prompt, prompts)):
        if cell.padding is not None:
            worst = max(found[0] for found in map(measure, walked) if found is not None)
            assert 1 <= cell.padding <= round(worst, 4)


@given(limits=limits(), entries=prompt_entries())
def test_bins_cut_an_axis_without_a_gap(limits, entries) -> None:
    heat_map = prompt_map(ReachablePrompts(limits), BucketTable(entries, ()))

    for axis in (heat_map.x, heat_map.y):
        spans = [axis.bounds(index) for index in range(len(axis.firsts))]
        assert [first for first, _ in spans[1:]] == [last + 1 for _, last in spans[:-1]]
        assert spans[-1][1] == axis.last
        assert all(axis.bin_of(value) == index for index, span in enumerate(spans) for value in span)


def test_the_largest_limits_that_a_spec_can_have_make_no_more_cells() -> None:
    long = 1 << 30
    limits = ServingLimits(
        max_num_seqs=4096,
        max_num_batched_tokens=long,
        max_model_len=long,
        block_size=128,
        num_blocks=long // 64,
        allow_long_max_model_len=True,
    )
    entry = PromptEntry(1, long, long // 128)

    heat_map = prompt_map(ReachablePrompts(limits), BucketTable((entry,), ()))

    assert max(len(heat_map.x.firsts), len(heat_map.y.firsts)) <= MAX_BINS
    assert sum(cell.num_steps for cell in heat_map.cells) == ReachablePrompts(limits).num_cells


def test_buckets_that_are_too_many_are_not_shown() -> None:
    limits = ServingLimits(
        max_num_seqs=1, max_num_batched_tokens=8192, max_model_len=8192, block_size=1, num_blocks=8192
    )
    entries = tuple(PromptEntry(1, query, 0) for query in range(1, MAX_BUCKETS + 2))

    assert prompt_map(ReachablePrompts(limits), BucketTable(entries, ())).buckets == ()


def test_traffic_is_added_up_by_cell() -> None:
    limits = ServingLimits(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=16, num_blocks=16
    )
    decodes, table = ReachableDecodes(limits), BucketTable((), (DecodeEntry(4, 1, 16),))
    traced = {(2, 5): Use(2, 5, 16), (4, 9): Use(2, 5, 20), (4, 10): Use(1, 10, 20)}

    found = decode_map(decodes, table, traced=traced)

    cells = {(cell.x, cell.y): (cell.num_traced, cell.padding) for cell in found.cells if cell.num_traced}
    assert cells == {(1, 4): (2, 3.2), (3, 8): (2, 4.0), (3, 9): (1, 2.0)}
    assert all(
        cell.num_traced == 0 and cell.padding is None for cell in found.cells if (cell.x, cell.y) not in cells
    )


def test_entries_of_one_size_and_state_are_one_bucket() -> None:
    limits = ServingLimits(
        max_num_seqs=4, max_num_batched_tokens=512, max_model_len=1024, block_size=128, num_blocks=16
    )
    entries = (PromptEntry(1, 512, 3), PromptEntry(2, 512, 3), PromptEntry(3, 512, 3))

    found = prompt_map(ReachablePrompts(limits), BucketTable(entries, ()), built=entries[:2])

    assert [(bucket.num_entries, bucket.is_built) for bucket in found.buckets] == [(2, True), (1, False)]
    assert {(bucket.x, bucket.y * found.y.scale) for bucket in found.buckets} == {(3, 512)}
