from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import decode_padding, prompt_padding
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.limits import ServingLimits

any_limits = st.builds(
    ServingLimits,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    max_model_len=st.integers(2, 40),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(1, 40),
)
prompt_entries = st.builds(PromptEntry, st.integers(1, 3), st.integers(1, 42), st.integers(0, 20))
decode_entries = st.builds(DecodeEntry, st.integers(1, 7), st.just(1), st.integers(1, 45))
tables = st.builds(
    BucketTable,
    st.lists(prompt_entries, max_size=12).map(tuple),
    st.lists(decode_entries, max_size=12).map(tuple),
)


def prompt_factors(limits: ServingLimits, table: BucketTable) -> dict[tuple[int, int, int], float]:
    """Cell -> factor, for every cell that the engine's look-up finds an entry for."""
    size, longest = limits.block_size, dict[tuple[int, int], int]()
    for query in range(1, limits.max_num_batched_tokens + 1):
        for context in range(limits.max_model_len - query + 1):
            cell = -(-query // size), -(-context // size)
            longest[cell] = max(query, longest.get(cell, 0))
    factors = {}
    for (_, blocks), query in longest.items():
        entry = table.find_prompt(1, query, blocks)
        if entry is not None:
            padded = entry.batch_size * (entry.query_len + entry.num_ctx_blocks * size)
            factors[1, query, blocks] = padded / (query + blocks * size)
    return factors


def decode_factors(
    limits: ServingLimits, table: BucketTable, *, contiguous_pa: bool
) -> dict[tuple[int, int, int], float]:
    factors = {}
    for batch in range(1, min(limits.max_num_seqs, limits.num_blocks) + 1):
        own = limits.num_blocks if contiguous_pa else batch * limits.max_blocks_per_seq
        for total in range(batch, min(limits.num_blocks, own) + 1):
            entry = table.find_decode(batch, total)
            if entry is not None:
                factors[batch, 1, total] = entry.num_blocks / total
    return factors


@given(any_limits, tables)
def test_prompt_padding_is_that_of_a_walk_over_all_cells(limits: ServingLimits, table: BucketTable) -> None:
    factors = prompt_factors(limits, table)

    padding = prompt_padding(limits, table)

    assert (padding is None) == (not factors)
    if padding is not None:
        assert padding.num_steps == len(factors)
        assert padding.mean == pytest.approx(sum(factors.values()) / len(factors))
        assert padding.worst == pytest.approx(max(factors.values()))
        assert factors[padding.worst_step] == pytest.approx(padding.worst)
        assert not padding.is_sampled


@given(any_limits, tables, st.booleans())
def test_decode_padding_is_that_of_a_walk_over_all_steps(
    limits: ServingLimits, table: BucketTable, contiguous_pa: bool
) -> None:
    factors = decode_factors(limits, table, contiguous_pa=contiguous_pa)

    padding = decode_padding(limits, table, contiguous_pa=contiguous_pa)

    assert (padding is None) == (not factors)
    if padding is not None:
        assert padding.num_steps == len(factors)
        assert padding.mean == pytest.approx(sum(factors.values()) / len(factors))
        assert padding.worst == pytest.approx(max(factors.values()))
        assert factors[padding.worst_step] == pytest.approx(padding.worst)


LIMITS = ServingLimits(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=16, num_blocks=8
)


def test_a_table_that_fits_every_step_pads_nothing() -> None:
    exact = BucketTable((), tuple(DecodeEntry(4, 1, total) for total in range(1, 9)))

    padding = decode_padding(LIMITS, exact)

    assert padding is not None
    assert (padding.mean, padding.worst) == (pytest.approx(1.0), 1.0)


def test_one_entry_for_all_is_worst_for_the_smallest_step() -> None:
    padding = prompt_padding(LIMITS, BucketTable((PromptEntry(1, 64, 4),), ()))

    assert padding is not None
    assert (padding.worst, padding.worst_step) == (128 / 16, (1, 16, 0))
    assert padding.num_steps == 4 + 4 + 3 + 2 + 1


def test_no_entry_no_padding() -> None:
    assert prompt_padding(LIMITS, BucketTable((), ())) is None
    assert decode_padding(LIMITS, BucketTable((), ())) is None


def test_where_there_are_too_many_rows_every_kth_is_measured_and_the_result_says_so() -> None:
    table = BucketTable(
        (PromptEntry(1, 64, 4), PromptEntry(1, 64, 1)), (DecodeEntry(4, 1, 8), DecodeEntry(4, 1, 4))
    )
    prompt, decode = prompt_factors(LIMITS, table), decode_factors(LIMITS, table, contiguous_pa=False)

    sampled = prompt_padding(LIMITS, table, max_segments=4)
    kept = [factor for (_, query, _), factor in prompt.items() if -(-query // 16) in (1, 3)]
    assert sampled is not None
    assert (sampled.row_stride, sampled.is_sampled, sampled.num_steps) == (2, True, len(kept))
    assert sampled.mean == pytest.approx(sum(kept) / len(kept))

    sampled = decode_padding(LIMITS, table, max_segments=4)
    kept = [factor for (batch, _, _), factor in decode.items() if batch in (1, 3)]
    assert sampled is not None
    assert (sampled.row_stride, sampled.num_steps) == (2, len(kept))
    assert sampled.mean == pytest.approx(sum(kept) / len(kept))


def test_long_rows_are_summed_as_precisely_as_short_ones() -> None:
    limits = ServingLimits(
        max_num_seqs=1, max_num_batched_tokens=16, max_model_len=16 * 5000, block_size=16, num_blocks=5000
    )
    table = BucketTable((PromptEntry(1, 16, 5000),), (DecodeEntry(1, 1, 5000),))

    padding = decode_padding(limits, table)

    assert padding is not None
    assert padding.mean == pytest.approx(sum(5000 / n for n in range(1, 5001)) / 5000, rel=1e-12)
