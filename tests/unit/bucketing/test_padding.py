from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import MAX_STEPS, decode_padding, prompt_padding
from aotgaudi.bucketing.reachable import ReachableDecodes, ReachablePrompts
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.limits import ServingLimits
from tests.unit.bucketing.walks import any_limits, tables


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

    padding = prompt_padding(ReachablePrompts(limits), table)

    assert (padding is None) == (not factors)
    if padding is not None:
        assert padding.num_steps == len(factors)
        assert padding.mean == pytest.approx(sum(factors.values()) / len(factors))
        assert padding.worst == pytest.approx(max(factors.values()))
        assert factors[padding.worst_step] == pytest.approx(padding.worst)
        assert padding.error == 0
        assert not padding.is_sampled


@given(any_limits, tables, st.booleans())
def test_decode_padding_is_that_of_a_walk_over_all_steps(
    limits: ServingLimits, table: BucketTable, contiguous_pa: bool
) -> None:
    factors = decode_factors(limits, table, contiguous_pa=contiguous_pa)

    padding = decode_padding(ReachableDecodes(limits, contiguous_pa), table)

    assert (padding is None) == (not factors)
    if padding is not None:
        assert padding.num_steps == len(factors)
        assert padding.mean == pytest.approx(sum(factors.values()) / len(factors))
        assert padding.worst == pytest.approx(max(factors.values()))
        assert factors[padding.worst_step] == pytest.approx(padding.worst)


@settings(deadline=None)
@given(any_limits, tables, st.booleans(), st.integers(1, 40))
def test_of_too_many_steps_a_sample_is_measured_and_no_factor_is_invented(
    limits: ServingLimits, table: BucketTable, contiguous_pa: bool, max_steps: int
) -> None:
    prompt = (
        prompt_factors(limits, table),
        prompt_padding(ReachablePrompts(limits), table, max_steps=max_steps),
    )
    decode = (
        decode_factors(limits, table, contiguous_pa=contiguous_pa),
        decode_padding(ReachableDecodes(limits, contiguous_pa), table, max_steps=max_steps),
    )

    for factors, padding in (prompt, decode):
        if padding is not None:
            assert padding.num_steps <= max_steps
            assert min(factors.values()) <= padding.mean <= padding.worst <= max(factors.values())
            assert factors[padding.worst_step] == pytest.approx(padding.worst)


LONG = ServingLimits(
    max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=32768, block_size=128, num_blocks=5746
)


def test_a_sample_is_within_its_error_and_finds_the_worst() -> None:
    table = BucketTable(
        tuple(PromptEntry(1, 128 * query, 2**context) for query in (1, 3, 9, 40, 64) for context in range(9)),
        tuple(DecodeEntry(batch, 1, 2**size) for batch in (1, 16, 256) for size in range(14)),
    )
    prompts, decodes = ReachablePrompts(LONG), ReachableDecodes(LONG)

    for sampled, whole in (
        (prompt_padding(prompts, table), prompt_padding(prompts, table, max_steps=10**6)),
        (decode_padding(decodes, table), decode_padding(decodes, table, max_steps=2 * 10**6)),
    ):
        assert sampled is not None
        assert whole is not None
        assert (sampled.is_sampled, sampled.num_steps, whole.is_sampled) == (True, MAX_STEPS, False)
        assert sampled.mean == pytest.approx(whole.mean, abs=sampled.error)
        assert sampled.error < 0.08 * sampled.mean
        assert (sampled.worst, sampled.worst_step) == (whole.worst, whole.worst_step)
