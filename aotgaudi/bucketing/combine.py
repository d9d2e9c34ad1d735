"""From ranges to tables, for every strategy (common.py 333-547 at vllm-gaudi 091bbad).

A table is the product of its ranges, corrected and filtered, as an ascending list without repetition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aotgaudi.bucketing.filters import (
    EDGE_MODEL_LEN,
    capped_decode,
    edge_context,
    is_off_slice,
    keeps_decode,
    keeps_prompt,
)
from aotgaudi.bucketing.inputs import Bucket, BucketingInputs, Ranges
from aotgaudi.errors import SpecError


def combine_prompt(ranges: Ranges, inputs: BucketingInputs) -> tuple[Bucket, ...]:
    """Returns the prompt table. Raises SpecError when no bucket is within the limits."""
    query_lens = [_rounded_query(query_len, inputs) for query_len in ranges.query_lens]
    found = {
        bucket
        for batch_size in ranges.batch_sizes
        for bucket in _prompt_rows(batch_size, query_lens, ranges.contexts, inputs)
        if keeps_prompt(bucket, inputs)
    }
    table = _table(found, "prompt", inputs)
    return tuple(bucket for bucket in table if not is_off_slice(bucket, inputs))


def combine_decode(ranges: Ranges, inputs: BucketingInputs) -> tuple[Bucket, ...]:
    """Returns the decode table before speculation. Raises SpecError when no bucket is within the limits."""
    contexts = ranges.contexts
    if inputs.contiguous_pa and contexts[-1] < inputs.num_blocks:
        contexts = (*contexts, inputs.num_blocks)
    product = (
        (batch_size, query_len, context)
        for batch_size in ranges.batch_sizes
        for context in contexts
        for query_len in ranges.query_lens
    )
    found = (capped_decode(bucket, inputs) for bucket in product if keeps_decode(bucket, inputs))
    return _table(found, "decode", inputs)


def with_speculation(seeds: tuple[Bucket, ...], inputs: BucketingInputs) -> tuple[Bucket, ...]:
    """Returns the decode table with a row for each of the drafted tokens and the next (common.py 333-371).

    `seeds` is the table before speculation; it is returned as it is when no tokens are drafted.
    """
    if inputs.num_speculative_tokens == 0:
        return seeds
    factor = inputs.num_speculative_tokens + 1
    found = set(seeds)
    for batch_size, _, context in seeds:
        if batch_size * factor <= context:
            found.add(capped_decode((batch_size * factor, 1, context), inputs))
        found.add(capped_decode((batch_size * factor, 1, context * factor), inputs))
    return tuple(sorted(found))


def _prompt_rows(
    batch_size: int, query_lens: Iterable[int], contexts: tuple[int, ...], inputs: BucketingInputs
) -> Iterator[Bucket]:
    """Yields the product; at the top of the context range the edge rule changes the context.

    A context that the edge rule has changed stays changed for the next, longer queries.
    """
    edge_applies = inputs.max_model_len >= EDGE_MODEL_LEN
    for first_context in contexts:
        context = first_context
        for query_len in query_lens:
            if edge_applies and first_context == contexts[-1]:
                context = edge_context(query_len, context, inputs)
            yield batch_size, query_len, context


def _rounded_query(query_len: int, inputs: BucketingInputs) -> int:
    chunk = inputs.mamba_chunk_size
    if chunk and inputs.mamba_chunk_size_is_explicit:
        return -(-query_len // chunk) * chunk
    return query_len


def _table(found: Iterable[Bucket], phase: str, inputs: BucketingInputs) -> tuple[Bucket, ...]:
    table = tuple(sorted(set(found)))
    if not table:
        raise SpecError(
            "limits",
            f"leave no {phase} bucket: block_size {inputs.block_size}, max_model_len {inputs.max_model_len},"
            f" max_num_batched_tokens {inputs.max_num_batched_tokens}",
            "a block must fit the model's length and the step's tokens",
        )
    return table
