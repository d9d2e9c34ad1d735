"""What a scheduler can form, as a walk over every step: the slow and plain counterpart of ``bucketing.reachable``."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import SchedulerSpec

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
