"""The linear strategy of the extension, 1.22: vllm_hpu_extension/bucketing/linear.py, at 8211e0b.

Its ranges are those of vllm-gaudi (`linear`), but for zero, which it has no value for. `extension` combines them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from aotgaudi.bucketing.inputs import Bucket, BucketingInputs
from aotgaudi.bucketing.linear import ONE, LinearAxis, linear_range
from aotgaudi.bucketing.size import check_num_buckets, check_num_values
from aotgaudi.errors import SpecError


@dataclass(frozen=True, slots=True)
class ExtensionLinear:
    """See ``extension.ExtensionSource``.

    `blocks_past_end`: a cached context may be so many blocks longer than the longest query has room for.
    """

    blocks_past_end: int = 1

    def prompt_batch_sizes(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the batch sizes of the prompt phase, ascending."""
        return extension_range(prompt_axes(inputs)[0], "bucketing.prompt.batch_size")

    def query_lens(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the query lengths of the prompt phase, ascending."""
        return extension_range(prompt_axes(inputs)[1], "bucketing.prompt.query_len")

    def contexts(self, query_len: int, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the contexts of a query with prefix caching: every number of blocks (linear.py 135-144)."""
        room = (prompt_axes(inputs)[1].maximum - query_len) // inputs.block_size
        check_num_values(room, "bucketing.prompt.num_ctx_blocks")
        return range(room + self.blocks_past_end + 1)

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending (linear.py 57-79 and 193-218)."""
        batch_axis, _ = axes = decode_axes(inputs, inputs.num_blocks)
        batch_sizes = extension_range(batch_axis, "bucketing.decode.batch_size")
        contexts = decode_contexts(axes[1], inputs)
        check_num_buckets(len(batch_sizes) * len(contexts), "decode")
        return tuple(
            (batch_size, 1, context)
            for batch_size in batch_sizes
            for context in cut_contexts(contexts[bisect_left(contexts, batch_size) :], inputs.num_blocks)
        )


def prompt_axes(inputs: BucketingInputs) -> tuple[LinearAxis, LinearAxis]:
    """Returns the batch sizes and the query lengths of the prompt phase (linear.py 23-40)."""
    block_size, bounds = inputs.block_size, inputs.prompt
    batch_size = LinearAxis.bounded(bounds.batch_size, 1, 32, inputs.max_num_prefill_seqs)
    query_len = LinearAxis.bounded(bounds.query_len, block_size, block_size, inputs.max_model_len)
    if not inputs.merged_prefill:
        return batch_size, query_len
    longest = min(batch_size.maximum * query_len.maximum, inputs.max_num_batched_tokens)
    return ONE, replace(query_len, maximum=longest)


def decode_axes(inputs: BucketingInputs, blocks_max: int) -> tuple[LinearAxis, LinearAxis]:
    """Returns the batch sizes and the contexts of the decode phase, up to `blocks_max` by default."""
    bounds, block_size = inputs.decode, inputs.block_size
    return (
        LinearAxis.bounded(bounds.batch_size, 1, 32, inputs.max_num_seqs),
        LinearAxis.bounded(bounds.num_blocks, block_size, block_size, blocks_max),
    )


def decode_contexts(axis: LinearAxis, inputs: BucketingInputs) -> tuple[int, ...]:
    """Returns the contexts of the decode phase, ascending.

    Under contiguous paged attention they reach the cache's end, unless a person says how far they go.
    """
    where = "bucketing.decode.num_blocks"
    if not inputs.contiguous_pa or inputs.decode.num_blocks.max is not None:
        return extension_range(axis, where)
    contexts = extension_range(replace(axis, maximum=inputs.num_blocks), where)
    return contexts if contexts[-1:] == (inputs.num_blocks,) else (*contexts, inputs.num_blocks)


def cut_contexts(contexts: Sequence[int], num_blocks: int) -> Iterator[int]:
    """Yields contexts; the first one that reaches the cache's end is cut there, and is the last."""
    for context in contexts:
        yield min(context, num_blocks)
        if context >= num_blocks:
            return


def extension_range(axis: LinearAxis, where: str) -> tuple[int, ...]:
    """Returns the values of one dimension. Raises SpecError for one from 0, where upstream does not end."""
    if axis.minimum < 1:
        raise SpecError(f"{where}.min", f"is {axis.minimum}", "at least 1 in this version")
    return linear_range(axis, where)
