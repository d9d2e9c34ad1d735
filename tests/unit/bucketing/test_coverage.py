from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.coverage import UncoveredSteps, uncovered
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.manifest.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.limits import ServingLimits

Step = tuple[str, int, int, int]


@st.composite
def small_limits(draw: st.DrawFn) -> ServingLimits:
    block_size, max_model_len = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    fewest = -(-max_model_len // block_size)
    return ServingLimits(
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.integers(block_size, 12)),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=draw(st.integers(fewest, fewest + 6)),
    )


size = st.integers(1, 8)
tables = st.builds(
    BucketTable,
    st.lists(st.builds(PromptEntry, st.integers(1, 2), size, st.integers(0, 12)), max_size=8).map(tuple),
    st.lists(st.builds(DecodeEntry, st.integers(1, 5), st.just(1), st.integers(1, 20)), max_size=8).map(
        tuple
    ),
)


def brute_force(limits: ServingLimits, table: BucketTable) -> Iterator[Step]:
    """Walks every context and every decode step one by one."""
    for start in range(0, limits.max_model_len, limits.block_size):
        context = start // limits.block_size
        needed = min(limits.block_size, limits.max_model_len - start)
        if not any(e.num_ctx_blocks >= context and e.query_len >= needed for e in table.prompt):
            yield "prompt", 1, needed, context
    for batch in range(1, limits.max_num_seqs + 1):
        for num_blocks in decode_totals(limits, batch):
            if not any(e.batch_size >= batch and e.num_blocks >= num_blocks for e in table.decode):
                yield "decode", batch, 1, num_blocks


def decode_totals(limits: ServingLimits, batch: int) -> range:
    blocks_per_seq = -(-limits.max_model_len // limits.block_size)
    return range(batch, min(limits.num_blocks, batch * blocks_per_seq) + 1)


def steps_of(hole: UncoveredSteps) -> Iterator[Step]:
    for num_blocks in range(hole.first_num_blocks, hole.last_num_blocks + 1):
        yield hole.kind, hole.batch_size, hole.query_len, num_blocks


@given(small_limits(), tables)
def test_uncovered_steps_are_exactly_those_that_a_walk_over_all_steps_finds(
    limits: ServingLimits, table: BucketTable
) -> None:
    found = [step for hole in uncovered(limits, table) for step in steps_of(hole)]

    assert sorted(found) == sorted(brute_force(limits, table))


@given(small_limits(), tables)
def test_a_covered_table_lets_every_prompt_end(limits: ServingLimits, table: BucketTable) -> None:
    """Plays the scheduler: chunks of whole blocks, or to the end, as long as covered, from every start."""
    if any(hole.kind == "prompt" for hole in uncovered(limits, table)):
        return
    for length in range(1, limits.max_model_len + 1):
        start = 0
        while start < length:
            longest = table.max_query_len(start // limits.block_size)
            step = min(longest, limits.max_num_batched_tokens, length - start)
            if start + step < length:
                step -= step % limits.block_size
            assert step > 0
            assert table.find_prompt(1, step, start // limits.block_size) is not None
            start += step


def test_a_hole_says_which_steps_it_is() -> None:
    limits = ServingLimits(
        max_num_seqs=2, max_num_batched_tokens=16, max_model_len=40, block_size=16, num_blocks=4
    )
    table = BucketTable((PromptEntry(1, 16, 0),), (DecodeEntry(1, 1, 3), DecodeEntry(2, 1, 3)))

    assert [str(hole) for hole in uncovered(limits, table)] == [
        "prompt of batch size 1, query length 16, 1 context blocks",
        "prompt of batch size 1, query length 8, 2 context blocks",
        "decode of batch size 2, query length 1, 4 blocks",
    ]
