"""Which combinations of a query and a context upstream keeps (common.py 386-547 at vllm-gaudi 091bbad).

Shared by every strategy. Each function is a question about one bucket.
"""

from __future__ import annotations

from aotgaudi.bucketing.inputs import Bucket, BucketingInputs

EDGE_MODEL_LEN = 8192
"""From this model length on the edge rule applies."""


def edge_context(query_len: int, context: int, inputs: BucketingInputs) -> int:
    """Returns the context at the top of the context range: as many blocks as `query_len` leaves room for."""
    edge = (inputs.max_model_len - query_len) // inputs.block_size
    if edge < 0:
        return context
    if inputs.prompt_ctx_max is not None and edge >= inputs.prompt_ctx_max:
        return context
    return edge


def keeps_prompt(bucket: Bucket, inputs: BucketingInputs) -> bool:
    """Whether a prompt bucket is within the model's length and the step's token budget."""
    batch_size, query_len, context = bucket
    if inputs.merged_prefill:
        num_seqs = inputs.max_num_prefill_seqs
        left = inputs.max_model_len - query_len // num_seqs
        return context <= num_seqs * (left // inputs.block_size)
    max_context = -(-(inputs.max_model_len - 1) // inputs.block_size)
    fits_model = context <= max_context and query_len <= inputs.max_model_len
    return fits_model and batch_size * query_len <= inputs.max_num_batched_tokens


def keeps_decode(bucket: Bucket, inputs: BucketingInputs) -> bool:
    """Whether a decode bucket has a block for every sequence; always under contiguous paged attention."""
    batch_size, _, context = bucket
    return inputs.contiguous_pa or batch_size <= context


def capped_decode(bucket: Bucket, inputs: BucketingInputs) -> Bucket:
    """Returns a decode bucket with at most the blocks that its sequences can have."""
    batch_size, query_len, context = bucket
    if inputs.contiguous_pa:
        return bucket
    return batch_size, query_len, min(context, batch_size * inputs.max_blocks_per_seq)


def is_off_slice(bucket: Bucket, inputs: BucketingInputs) -> bool:
    """Whether sliced attention cannot run a prompt bucket: long, without context, no multiple of a slice."""
    _, query_len, context = bucket
    if inputs.sliding is None or context != 0:
        return False
    return query_len >= inputs.sliding.threshold and query_len % inputs.sliding.slice_len != 0
