"""The exponential strategy of vllm-hpu-extension, and of vllm-gaudi v0.10.1, by version.

Source: vllm_hpu_extension/bucketing/exponential.py 30-201 at 8211e0b. See ``bucketing.extension``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from aotgaudi.bucketing.exponential_range import ExponentialAxis, RangeRule, ceil_log2, exponential_range
from aotgaudi.bucketing.inputs import Bucket, BucketingInputs
from aotgaudi.bucketing.size import check_num_buckets
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds

_LONG_MODEL_LEN = 8192
"""From this model length on, half of the query lengths are spaced linearly."""

EXTENSION_POINTS = RangeRule(
    special_minima=frozenset(), clips_last=False, fills=True, knows_long_context=True
)
"""How every version of the extension chooses points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionExponentialRules:
    """What changed between versions; the defaults are those of 8211e0b.

    `long_context`: for which models half of the query lengths are spaced linearly. `dense_contexts`: a query
    has every context, rather than exponentially spaced ones. `heeds_limits`: VLLM_*_BUCKET_LIMIT count.
    """

    batch_size_step: int = 2
    long_context: Literal["never", "long", "always"] = "long"
    dense_contexts: bool = False
    heeds_limits: bool = False


@dataclass(frozen=True, slots=True)
class ExtensionExponential:
    """Values of both phases. See ``extension.ExtensionSource``."""

    rules: ExtensionExponentialRules = ExtensionExponentialRules()

    def prompt_batch_sizes(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the batch sizes of the prompt phase, ascending."""
        return self._batch_sizes(inputs.max_num_prefill_seqs, inputs.prompt.batch_size, inputs)

    def query_lens(self, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the query lengths of the prompt phase, ascending. Raises SpecError for too short models."""
        axis = self._axis(inputs.block_size, inputs.block_size, inputs.max_model_len, inputs.prompt.query_len)
        long_context = self.rules.long_context == "always" or (
            self.rules.long_context == "long" and inputs.max_model_len >= _LONG_MODEL_LEN
        )
        return exponential_range(
            axis, EXTENSION_POINTS, contiguous_pa=inputs.contiguous_pa, long_context=long_context
        )

    def contexts(self, query_len: int, inputs: BucketingInputs) -> Sequence[int]:
        """Returns the contexts of a query, ascending; small ones may be there twice.

        Raises:
            SpecError: the query is longer than the model, where upstream takes the logarithm of that.
        """
        most = (inputs.max_model_len - query_len) // inputs.block_size
        if self.rules.dense_contexts:
            return range(most + 1)
        if most < 0:
            raise SpecError(
                "limits.max_model_len",
                f"is {inputs.max_model_len}, shorter than the prompt bucket of {query_len} tokens",
                f"a multiple of block_size {inputs.block_size}",
            )
        if most == 0:
            return (0,)
        num_points = ceil_log2(most) + 1
        share = 1 / float(num_points)
        return (0, *(math.ceil(math.pow(most, share * index)) for index in range(1, num_points + 1)))

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending: all combinations, also of more sequences than blocks."""
        batch_sizes = self._batch_sizes(inputs.max_num_seqs, inputs.decode.batch_size, inputs)
        axis = self._axis(inputs.block_size, inputs.block_size, inputs.num_blocks, inputs.decode.num_blocks)
        blocks = exponential_range(axis, EXTENSION_POINTS, contiguous_pa=inputs.contiguous_pa)
        check_num_buckets(len(batch_sizes) * len(blocks), "decode")
        return tuple(product(batch_sizes, (1,), blocks))

    def _batch_sizes(self, most: int, bounds: AxisBounds, inputs: BucketingInputs) -> tuple[int, ...]:
        axis = self._axis(1, self.rules.batch_size_step, most, bounds)
        return exponential_range(axis, EXTENSION_POINTS, contiguous_pa=inputs.contiguous_pa)

    def _axis(self, minimum: int, step: int, maximum: int, bounds: AxisBounds) -> ExponentialAxis:
        limit = ceil_log2(maximum) + 1
        if self.rules.heeds_limits and bounds.limit is not None:
            limit = bounds.limit
        return ExponentialAxis(minimum, step, maximum, limit)
