"""What a scheduler can form, as a walk over every step: the slow and plain counterpart of ``bucketing.reachable``."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec

any_limits = st.builds(
    ServingLimits,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 26),
    max_model_len=st.integers(2, 24),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(1, 20),
)
prompt_entries = st.builds(PromptEntry, st.integers(1, 3), st.integers(1, 26), st.integers(0, 12))
decode_entries = st.builds(DecodeEntry, st.integers(1, 7), st.just(1), st.integers(1, 22))
tables = st.builds(
    BucketTable,
    st.lists(prompt_entries, max_size=8).map(tuple),
    st.lists(decode_entries, max_size=8).map(tuple),
)
schedulers = st.sampled_from(
    [
        SchedulerSpec(),
        SchedulerSpec(engine="vllm"),
        SchedulerSpec(engine="vllm", chunked_prefill=False),
    ]
)


def chunk_starts(limits: ServingLimits, bucketing: BucketingSpec, scheduler: SchedulerSpec) -> list[int]:
    """The tokens after which a prompt's chunk may start.

    vLLM's whole prompts start after cached blocks, or after nothing; whoever computes chunks may start anywhere.
    """
    if scheduler.engine == "vllm" and not scheduler.chunked_prefill:
        cached = range(0, limits.max_model_len, limits.block_size)
        return list(cached) if bucketing.prefix_caching else [0]
    return list(range(limits.max_model_len))


def all_prompts(
    limits: ServingLimits,
    bucketing: BucketingSpec,
    scheduler: SchedulerSpec,
) -> Iterator[tuple[int, int]]:
    """Yields (query, context) of every chunk, in tokens."""
    for context in chunk_starts(limits, bucketing, scheduler):
        for query in range(1, min(limits.max_num_batched_tokens, limits.max_model_len - context) + 1):
            yield query, context
