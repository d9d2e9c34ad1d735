"""Speculative decodes against a walk that restates what vLLM's runner does, step by step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps, closing_entries, prove_steps
from aotgaudi.bucketing.reachable import ReachableDecodes
from aotgaudi.bucketing.speculation import SpeculativeDecodes
from aotgaudi.bucketing.strategy import Bucket
from aotgaudi.bucketing.upstream import first_covering
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec

limits_with_few_blocks = st.builds(
    ServingLimits,
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.just(16),
    max_model_len=st.integers(2, 12),
    block_size=st.integers(1, 4),
    num_blocks=st.integers(1, 10),
)
seed_buckets = st.lists(st.tuples(st.integers(1, 5), st.just(1), st.integers(1, 12)), max_size=4).map(tuple)
further = st.lists(st.tuples(st.integers(1, 15), st.just(1), st.integers(1, 32)), max_size=5).map(tuple)


def graph_of(
    step: tuple[int, int, int], seeds: list[Bucket], table: list[Bucket], *, contiguous_pa: bool
) -> DecodeEntry | None:
    """The graph of a step of (tokens, sequences, blocks); None where its blocks are not padded."""
    num_tokens, batch_size, blocks = step
    first = first_covering(seeds, (batch_size, 1, blocks)) or first_covering(table, (batch_size, 1, blocks))
    if first is None:
        return None
    rows, total = first[0] * num_tokens, blocks if contiguous_pa else blocks * num_tokens
    second = first_covering(table, (rows, 1, total))
    return None if second is None else DecodeEntry(rows, 1, second[2])


@settings(deadline=None, max_examples=30)
@given(limits_with_few_blocks, st.booleans(), st.integers(2, 4), seed_buckets, further)
def test_holes_are_those_of_a_walk_over_all_steps(
    limits: ServingLimits,
    contiguous_pa: bool,
    most_tokens: int,
    seeds: tuple[Bucket, ...],
    others: tuple[Bucket, ...],
) -> None:
    decodes = ReachableDecodes(limits, contiguous_pa)
    full = (decodes.max_batch_size, 1, limits.num_blocks)  # Without it there is no padded batch.
    table = sorted({*seeds, *others, full})
    entries = {DecodeEntry(*bucket) for bucket in table}
    steps = [
        (num_tokens, batch_size, blocks)
        for num_tokens in range(2, most_tokens + 1)
        for batch_size in range(1, decodes.max_batch_size + 1)
        for blocks in range(batch_size, decodes.most_blocks(batch_size) + 1)
    ]
    graphs = {step: graph_of(step, sorted(seeds), table, contiguous_pa=contiguous_pa) for step in steps}

    speculative = SpeculativeDecodes(decodes, most_tokens, seeds)
    holes = list(speculative.holes(entries))
    found = {
        step
        for step in steps
        for run in holes
        if run.num_tokens == step[0]
        and run.first_batch_size <= step[1] <= run.last_batch_size
        and run.fewest_blocks <= step[2] <= run.most_blocks
    }

    assert speculative.num_steps == len(steps)
    assert found == {step for step, graph in graphs.items() if graph not in entries}
    assert sum(run.num_steps for run in holes) == len(found)
    for run in speculative.runs(entries):
        if run.is_padded and run.num_steps:
            assert graphs[run.smallest_step] == run.entry


@settings(deadline=None, max_examples=30)
@given(limits_with_few_blocks, st.booleans(), st.integers(2, 4), seed_buckets, further)
def test_the_closing_entries_leave_no_hole(
    limits: ServingLimits,
    contiguous_pa: bool,
    most_tokens: int,
    seeds: tuple[Bucket, ...],
    others: tuple[Bucket, ...],
) -> None:
    speculative = SpeculativeDecodes(ReachableDecodes(limits, contiguous_pa), most_tokens, seeds)
    entries = {DecodeEntry(*bucket) for bucket in (*seeds, *others)}

    added = speculative.closing_entries(entries)

    assert not entries & set(added)
    assert list(speculative.holes({*entries, *added})) == []


LIMITS = ServingLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=16, num_blocks=32
)
VLLM = SchedulerSpec(engine="vllm")


def test_a_batch_of_the_most_sequences_with_fewer_drafts_runs_a_graph_that_is_in_no_public_table() -> None:
    """Two drafted tokens: the table has batches times 3. With one draft 8 sequences make 16 rows, not 24."""
    bucketing = BucketingSpec(num_speculative_tokens=2)
    steps = ReachableSteps.of(LIMITS, bucketing, VLLM)
    prompts = (PromptEntry(1, 64, 4),)
    public = BucketTable(prompts, tuple(DecodeEntry(n, 1, 32 * n) for n in (1, 2, 4, 8, 3, 6, 12, 24)))

    coverage = prove_steps(steps, public)
    closed = BucketTable(
        prompts, (*public.decode, *speculative_entries(closing_entries(steps, bucketing, public)))
    )

    assert "speculative" in {phase.kind for phase in coverage.phases if phase.num_uncovered}
    assert DecodeEntry(16, 1, 768) in closed.decode
    assert prove_steps(steps, closed).is_closed


def speculative_entries(added: tuple[object, ...]) -> tuple[DecodeEntry, ...]:
    return tuple(entry for entry in added if isinstance(entry, DecodeEntry))


def test_our_own_scheduler_forms_no_speculative_steps() -> None:
    steps = ReachableSteps.of(LIMITS, BucketingSpec(num_speculative_tokens=2))

    assert steps.speculative.num_steps == 0
    assert list(steps.speculative.runs(())) == []
