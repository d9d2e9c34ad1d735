"""Planes: the cells add up to the proof, whatever the limits and the table; and each one counts what a walk counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import decode_holes, prompt_holes
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.report.planes import MAX_BINS, MAX_POINTS, EntryFacts, bin_of, decode_plane, prompt_plane
from aotgaudi.report.values import Axis, Plane, Traffic
from aotgaudi.spec.limits import ServingLimits

PUBLIC = EntryFacts("public", None)
CONTEXTS = ("any", "blocks", "none")


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


def span_of(plane: Plane, name: str, index: int) -> range:
    axis: Axis = getattr(plane, name)
    first, last = axis.bounds(index)
    return range(first, last + 1)


@given(limits=limits(), entries=prompt_entries(), contexts=st.sampled_from(CONTEXTS))
def test_prompt_cells_add_up_to_the_proof(limits, entries, contexts) -> None:
    prompts, table = ReachablePrompts(limits, contexts), BucketTable(entries, ())

    plane = prompt_plane(prompts, table, lambda _: PUBLIC, {})

    assert sum(cell.num_steps for cell in plane.cells) == prompts.num_cells
    uncovered = sum(hole.num_cells for hole in prompt_holes(prompts, table))
    assert sum(cell.num_uncovered for cell in plane.cells) == uncovered
    assert sum(cell.num_entries for cell in plane.cells) == len(entries)
    assert sum(point.num_entries for point in plane.points) == len(entries)
    assert max(len(plane.x.firsts), len(plane.y.firsts)) <= MAX_BINS


@given(
    limits=limits(),
    prompts=prompt_entries(),
    decodes=decode_entries(),
    contexts=st.sampled_from(CONTEXTS),
    data=st.data(),
)
def test_cold_steps_are_those_that_only_what_is_built_lacks(limits, prompts, decodes, contexts, data) -> None:
    def some(entries):
        return tuple(entry for entry in entries if data.draw(st.booleans()))

    table, built = BucketTable(prompts, decodes), BucketTable(some(prompts), some(decodes))
    formed, decoded = ReachablePrompts(limits, contexts), ReachableDecodes(limits)

    planes = (
        prompt_plane(formed, table, lambda _: PUBLIC, {}, built),
        decode_plane(decoded, table, lambda _: PUBLIC, {}, built),
    )

    counts = (
        [sum(hole.num_cells for hole in prompt_holes(formed, one)) for one in (built, table)],
        [sum(hole.num_steps for hole in decode_holes(decoded, one)) for one in (built, table)],
    )
    for plane, (lacking, uncovered) in zip(planes, counts, strict=True):
        assert sum(cell.num_cold for cell in plane.cells) == lacking - uncovered
        assert all(0 <= cell.num_cold <= cell.num_steps - cell.num_uncovered for cell in plane.cells)


@given(limits=limits(), entries=decode_entries(), contiguous=st.booleans())
def test_decode_cells_add_up_to_the_proof(limits, entries, contiguous) -> None:
    decodes, table = ReachableDecodes(limits, contiguous), BucketTable((), entries)

    plane = decode_plane(decodes, table, lambda _: PUBLIC, {})

    assert sum(cell.num_steps for cell in plane.cells) == decodes.num_steps
    uncovered = sum(hole.num_steps for hole in decode_holes(decodes, table))
    assert sum(cell.num_uncovered for cell in plane.cells) == uncovered
    assert sum(cell.num_entries for cell in plane.cells) == len(entries)


@given(limits=limits(), entries=prompt_entries(1))
def test_a_prompt_cell_counts_what_a_walk_over_it_counts(limits, entries) -> None:
    prompts, table = ReachablePrompts(limits), BucketTable(entries, ())
    plane = prompt_plane(prompts, table, lambda _: PUBLIC, {})

    for cell in plane.cells[:: max(1, len(plane.cells) // 20)]:
        walked = [
            (ctx, row)
            for ctx in span_of(plane, "x", cell.x)
            for row in span_of(plane, "y", cell.y)
            if ctx <= prompts.max_ctx_blocks and 0 < row <= prompts.row_of(prompts.longest_query(ctx))
        ]
        lacking = [
            step
            for step in walked
            if not any(
                entry.num_ctx_blocks >= step[0]
                and entry.query_len >= min(prompts.row_query(step[1]), prompts.longest_query(step[0]))
                for entry in entries
            )
        ]
        assert (cell.num_steps, cell.num_uncovered) == (len(walked), len(lacking))
        assert (cell.padding is None) <= bool(lacking or not walked)


@given(limits=limits(), entries=decode_entries(), contiguous=st.booleans())
def test_a_decode_cell_counts_what_a_walk_over_it_counts(limits, entries, contiguous) -> None:
    decodes, table = ReachableDecodes(limits, contiguous), BucketTable((), entries)
    plane = decode_plane(decodes, table, lambda _: PUBLIC, {})

    for cell in plane.cells[:: max(1, len(plane.cells) // 20)]:
        walked = [
            (batch, blocks)
            for batch in span_of(plane, "x", cell.x)
            for blocks in span_of(plane, "y", cell.y)
            if batch <= decodes.max_batch_size and batch <= blocks <= decodes.most_blocks(batch)
        ]
        lacking = [
            s for s in walked if not any(e.batch_size >= s[0] and e.num_blocks >= s[1] for e in entries)
        ]
        assert (cell.num_steps, cell.num_uncovered) == (len(walked), len(lacking))


@given(limits=limits(), entries=prompt_entries(1))
def test_padding_of_a_cell_is_between_one_and_the_worst(limits, entries) -> None:
    plane = prompt_plane(ReachablePrompts(limits), BucketTable(entries, ()), lambda _: PUBLIC, {})

    factors = [cell.padding for cell in plane.cells if cell.padding is not None]

    assert all(factor >= 1 for factor in factors)
    assert (plane.padding is None) <= (not factors or plane.padding is None)


@given(limits=limits(), entries=prompt_entries())
def test_bins_cut_an_axis_without_a_gap(limits, entries) -> None:
    plane = prompt_plane(ReachablePrompts(limits), BucketTable(entries, ()), lambda _: PUBLIC, {})

    for axis in (plane.x, plane.y):
        spans = [axis.bounds(index) for index in range(len(axis.firsts))]
        assert [first for first, _ in spans[1:]] == [last + 1 for _, last in spans[:-1]]
        assert spans[-1][1] == axis.last
        assert all(bin_of(axis, value) == index for index, span in enumerate(spans) for value in span)


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

    plane = prompt_plane(ReachablePrompts(limits), BucketTable((entry,), ()), lambda _: PUBLIC, {})

    assert max(len(plane.x.firsts), len(plane.y.firsts)) <= MAX_BINS
    assert sum(cell.num_steps for cell in plane.cells) == ReachablePrompts(limits).num_cells


def test_entries_that_are_too_many_are_counted_by_cell_and_not_one_by_one() -> None:
    limits = ServingLimits(
        max_num_seqs=1, max_num_batched_tokens=8192, max_model_len=8192, block_size=1, num_blocks=8192
    )
    entries = tuple(PromptEntry(1, query, 0) for query in range(1, MAX_POINTS + 2))

    plane = prompt_plane(ReachablePrompts(limits), BucketTable(entries, ()), lambda _: PUBLIC, {})

    assert plane.points == ()
    assert sum(cell.num_entries for cell in plane.cells) == MAX_POINTS + 1


def test_traffic_is_added_up_by_cell() -> None:
    limits = ServingLimits(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=16, num_blocks=16
    )
    decodes, table = ReachableDecodes(limits), BucketTable((), (DecodeEntry(4, 1, 16),))
    one = Traffic(num_steps=2, useful=5.0, padded=16.0, share=0.25)

    plane = decode_plane(decodes, table, lambda _: PUBLIC, {(2, 5): one, (4, 9): one})

    assert plane.traffic == Traffic(num_steps=4, useful=10.0, padded=32.0, share=0.5)
    assert sum(cell.traffic.padded for cell in plane.cells if cell.traffic) == 32


@pytest.mark.parametrize("size", [(1, 128, 0), (2, 512, 3)])
def test_entries_of_one_size_and_origin_are_one_point(size) -> None:
    limits = ServingLimits(
        max_num_seqs=4, max_num_batched_tokens=512, max_model_len=1024, block_size=128, num_blocks=16
    )
    batch, query, ctx = size
    entries = (PromptEntry(batch, query, ctx), PromptEntry(batch + 1, query, ctx))

    plane = prompt_plane(ReachablePrompts(limits), BucketTable(entries, ()), lambda _: PUBLIC, {})

    (point,) = plane.points
    assert (point.x, point.y * plane.y.scale, point.num_entries) == (ctx, query, 2)
