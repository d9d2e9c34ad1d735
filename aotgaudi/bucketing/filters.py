"""Which combinations of a query and a context vllm-gaudi keeps, and how it corrects them, by version.

Shared by every strategy of vllm-gaudi (common.py 386-547 at 091bbad). Each function is a question about one
bucket, or about the contexts that go with one batch size and query length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aotgaudi.bucketing.strategy import Bucket, BucketingInputs

EDGE_MODEL_LEN = 8192
"""From this model length on the edge rule applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRules:
    """The rules that changed between versions of vllm-gaudi; the defaults are those of 091bbad.

    `edge`: whether the top of the context range becomes what each query leaves room for, and whether
    VLLM_PROMPT_CTX_BUCKET_MAX bounds it. `prompt_fit`: a prompt's context and query are within the model's
    length in ``total``, or ``apart`` (a padded query may reach past the end).
    `mamba_rounding`: which models' queries are rounded up to the chunk. `mamba_floors_decode`: for models with
    mamba layers, decode contexts are at most the *whole* blocks of the model's length, always.
    `mamba_divides_step`: the step's tokens must be a multiple of the chunk. `speculates`: decode buckets for
    speculative decoding are added.
    """

    edge: Literal["none", "unbounded", "bounded"] = "bounded"
    prompt_fit: Literal["total", "apart"] = "apart"
    mamba_rounding: Literal["never", "always", "explicit"] = "explicit"
    mamba_floors_decode: bool = False
    mamba_divides_step: bool = True
    speculates: bool = True


def has_edge(inputs: BucketingInputs, rules: ProductRules) -> bool:
    """Whether the edge rule applies."""
    return rules.edge != "none" and inputs.max_model_len >= EDGE_MODEL_LEN


def edge_context(query_len: int, context: int, inputs: BucketingInputs, rules: ProductRules) -> int:
    """Returns the context at the top of the context range: as many blocks as `query_len` leaves room for."""
    edge = (inputs.max_model_len - query_len) // inputs.block_size
    if edge < 0:
        return context
    if rules.edge == "bounded" and inputs.prompt_ctx_max is not None and edge >= inputs.prompt_ctx_max:
        return context
    return edge


def rounded_query(query_len: int, inputs: BucketingInputs, rules: ProductRules) -> int:
    """Returns the query length that a model with mamba layers computes."""
    chunk = inputs.mamba_chunk_size
    if chunk == 0 or rules.mamba_rounding == "never":
        return query_len
    if rules.mamba_rounding == "explicit" and not inputs.mamba_chunk_size_is_explicit:
        return query_len
    return -(-query_len // chunk) * chunk


def most_prompt_context(
    batch_size: int, query_len: int, inputs: BucketingInputs, rules: ProductRules
) -> int | None:
    """Returns the most context blocks of a prompt bucket; None where no context is kept.

    Once it is None it is so for every longer query and every larger batch.
    """
    max_model_len, block_size = inputs.max_model_len, inputs.block_size
    if inputs.merged_prefill:
        num_seqs = inputs.max_num_prefill_seqs
        return num_seqs * ((max_model_len - query_len // num_seqs) // block_size)
    if query_len > max_model_len or batch_size * query_len > inputs.max_num_batched_tokens:
        return None
    if rules.prompt_fit == "total":
        return (max_model_len - query_len) // block_size
    return -(-(max_model_len - 1) // block_size)


def keeps_prompt(bucket: Bucket, inputs: BucketingInputs, rules: ProductRules) -> bool:
    """Whether a prompt bucket is within the model's length and the step's token budget."""
    batch_size, query_len, context = bucket
    most = most_prompt_context(batch_size, query_len, inputs, rules)
    return most is not None and context <= most


def keeps_decode(bucket: Bucket, inputs: BucketingInputs) -> bool:
    """Whether a decode bucket has a block for every sequence; always under contiguous paged attention."""
    batch_size, _, context = bucket
    return inputs.contiguous_pa or batch_size <= context


def most_decode_context(batch_size: int, inputs: BucketingInputs, rules: ProductRules) -> int | None:
    """Returns the most context blocks of a decode bucket; None where nothing bounds them.

    With ``mamba_floors_decode`` it may be 0, which upstream keeps as a bucket.
    """
    if inputs.mamba_chunk_size and rules.mamba_floors_decode:
        return batch_size * (inputs.max_model_len // inputs.block_size)
    return None if inputs.contiguous_pa else batch_size * inputs.max_blocks_per_seq


def capped_decode(bucket: Bucket, inputs: BucketingInputs, rules: ProductRules) -> Bucket:
    """Returns a decode bucket with at most the blocks that its sequences can have."""
    batch_size, query_len, context = bucket
    most = most_decode_context(batch_size, inputs, rules)
    return bucket if most is None else (batch_size, query_len, min(context, most))


def is_off_slice(bucket: Bucket, inputs: BucketingInputs) -> bool:
    """Whether sliced attention cannot run a prompt bucket: long, without context, no multiple of a slice."""
    _, query_len, context = bucket
    return context == 0 and is_off_slice_query(query_len, inputs)


def is_off_slice_query(query_len: int, inputs: BucketingInputs) -> bool:
    """Whether a query length is long and no multiple of a slice; False where attention is not sliced."""
    sliding = inputs.sliding
    return sliding is not None and query_len >= sliding.threshold and query_len % sliding.slice_len != 0
