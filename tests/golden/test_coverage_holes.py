"""The holes of vllm-gaudi's exponential tables (091bbad), as they were counted with the public look-up.

S=256, P=1, B=128, N=5746, contiguous paged attention off. Cells are (query in blocks, context blocks).
"""

from __future__ import annotations

import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps, close, prove_steps
from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits

ROWS = [
    # max_model_len, max_num_batched_tokens, prompt buckets, cells, cells without a bucket, entries that close it
    (4096, 8192, 70, 560, 1, 1),
    (8192, 8192, 23, 2_144, 379, 6),
    (32768, 8192, 120, 14_432, 379, 6),
    (131072, 8192, 144, 63_584, 379, 6),
    (131072, 131072, 33, 525_824, 112_180, 10),
]
UPSTREAM = BucketingSpec(coverage="upstream")


def limits_of(max_model_len: int, max_num_batched_tokens: int) -> ServingLimits:
    return ServingLimits(
        max_num_seqs=256,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=128,
        num_blocks=5746,
    )


def public_table(limits: ServingLimits) -> BucketTable:
    strategy = find_strategy(UPSTREAM.version, UPSTREAM.strategy)
    inputs = BucketingInputs.from_spec(limits, UPSTREAM)
    return BucketTable(
        tuple(PromptEntry(*bucket) for bucket in strategy.prompt_table(inputs)),
        tuple(DecodeEntry(*bucket) for bucket in strategy.decode_table(inputs)),
    )


@pytest.mark.parametrize(
    ("max_model_len", "max_tokens", "num_buckets", "num_cells", "num_holes", "num_added"), ROWS
)
def test_cells_holes_and_what_closes_them(
    max_model_len: int, max_tokens: int, num_buckets: int, num_cells: int, num_holes: int, num_added: int
) -> None:
    limits = limits_of(max_model_len, max_tokens)
    table = public_table(limits)

    prompt, decode = prove_steps(ReachableSteps.of(limits), table).phases
    additions = close(ReachableSteps.of(limits), 2.0, table)
    added = tuple(addition.entry for addition in additions if isinstance(addition.entry, PromptEntry))
    closed = prove_steps(ReachableSteps.of(limits), BucketTable((*table.prompt, *added), table.decode))

    assert len(set(table.prompt)) == num_buckets
    assert (prompt.num_reachable, prompt.num_uncovered) == (num_cells, num_holes)
    assert decode.num_uncovered == 0
    assert len(additions) == len(added) == num_added
    assert closed.is_closed
    assert closed.phases[0].num_uncovered == 0


def test_the_example_of_the_public_table_is_a_hole() -> None:
    """A query of 6500 tokens after 13 blocks: 8,164 tokens, within max_model_len 8192."""
    limits = limits_of(8192, 8192)
    table = public_table(limits)

    assert table.find_prompt(1, 6500, 13) is None
    assert str(prove_steps(ReachableSteps.of(limits), table)) == (
        "no entry for 379 of 2,144 prompt cells; the smallest:"
        " a prompt chunk of 5,889 tokens after 1 token (1 block), 5,890 in all"
    )
