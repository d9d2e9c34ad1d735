"""What a bucketing strategy takes, what it returns, and how large its tables may become.

Frozen values and stateless functions. Nothing here reads the environment. ``bucketing.versions`` has the strategies of
every version. The simplest one, `TunedStrategy`, is here too: its buckets are listed in the spec.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Protocol

from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import BucketingSpec, DecodeBounds, PromptBounds, SlidingSpec, TunedBuckets
from aotgaudi.spec.limits import ServingLimits

Bucket = tuple[int, int, int]
"""``(batch size, query length, context blocks)``, as upstream writes it."""


UnifiedBucket = tuple[int, int, int, int]
"""``(query length, shared context blocks, unique context blocks, is causal)``, as upstream writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketingInputs:
    """The numbers and modes that decide the tables. Lengths are in tokens, `num_blocks` in KV blocks.

    The modes are those of ``spec.bucketing.BucketingSpec``. `num_blocks` is upstream's num_hpu_blocks.
    """

    max_num_seqs: int
    max_num_prefill_seqs: int
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    contiguous_pa: bool = False
    prefix_caching: bool = True
    merged_prefill: bool = False
    num_speculative_tokens: int = 0
    mamba_chunk_size: int = 0
    mamba_chunk_size_is_explicit: bool = False
    skip_decode_block_clamp: bool = False
    sliding: SlidingSpec | None = None
    prompt: PromptBounds = field(default_factory=PromptBounds)
    decode: DecodeBounds = field(default_factory=DecodeBounds)
    file_text: str | None = None
    tuned: TunedBuckets | None = None

    @classmethod
    def from_spec(cls, limits: ServingLimits, bucketing: BucketingSpec) -> BucketingInputs:
        """Returns the inputs of a spec, whose tables have all of them under the same names."""
        values = {**dict(limits), **dict(bucketing)}
        return cls(**{each.name: values[each.name] for each in fields(cls)})

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that a sequence of `max_model_len` tokens occupies."""
        return -(-self.max_model_len // self.block_size)

    @property
    def query_min(self) -> int:
        """The shortest prompt query that is a bucket: a block, or 1 if the spec says so."""
        return 1 if self.prompt.query_len.min == 1 else self.block_size

    @property
    def prompt_ctx_max(self) -> int | None:
        """Upstream's VLLM_PROMPT_CTX_BUCKET_MAX; None if that is unset."""
        return self.prompt.num_ctx_blocks.max


@dataclass(frozen=True, slots=True)
class Ranges:
    """The values of each dimension of one phase, ascending. A table is made from their product.

    Upstream's ranges may repeat a value, which changes no table.
    """

    batch_sizes: tuple[int, ...]
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]


MAX_BUCKETS = 4_000_000
"""The most buckets of one phase. A million take about 0.1 s and 100 MB. Compiling them would take months."""

MAX_RANGE_VALUES = 1_000_000
"""The most values of one dimension."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector of this process while a table is made.

    A table has no cycles, and the collector's scans of a million new tuples take longer than making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_num_buckets(num_buckets: int, phase: str) -> None:
    """Raises SpecError if a phase would have more than `MAX_BUCKETS`."""
    if num_buckets > MAX_BUCKETS:
        raise SpecError(
            f"bucketing.{phase}",
            f"gives {num_buckets:,} {phase} buckets, more than {MAX_BUCKETS:,}",
            "a larger step or a smaller max of a dimension, smaller limits, or exponential bucketing",
        )


def check_num_values(num_values: int, dimension: str) -> None:
    """Raises SpecError if a dimension (its dotted path) would have more than `MAX_RANGE_VALUES`."""
    if num_values > MAX_RANGE_VALUES:
        raise SpecError(
            dimension,
            f"gives {num_values:,} values, more than {MAX_RANGE_VALUES:,}",
            "a larger step or a smaller max",
        )


class Strategy(Protocol):
    """Gives upstream's lists exactly, including order and repetitions. Stateless.

    All three methods raise SpecError where upstream raises, and if a table would be too large.
    """

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets."""
        ...

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, including those of speculative decoding."""
        ...

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets before those of speculative decoding are added."""
        ...


class UnifiedStrategy(Protocol):
    """Gives upstream's list for unified attention, where one step holds prompts and decodes. Stateless."""

    def unified_table(self, inputs: BucketingInputs) -> tuple[UnifiedBucket, ...]:
        """Returns the unified buckets."""
        ...


class TunedStrategy:
    """The buckets that the spec lists. Refuses a bucket that no step under the limits can need. See `Strategy`."""

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets, ascending."""
        for query_len, num_ctx_blocks in _tuned(inputs).prompts:
            _require("prompts", query_len, inputs.max_num_batched_tokens, "max_num_batched_tokens")
            _require("prompts", num_ctx_blocks, inputs.max_blocks_per_seq, "the blocks of max_model_len")
        return tuple((1, query_len, num_ctx_blocks) for query_len, num_ctx_blocks in _tuned(inputs).prompts)

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, ascending."""
        return self.decode_seed_table(inputs)

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets. Nothing is added for speculation."""
        for batch_size, num_blocks in _tuned(inputs).decodes:
            _require("decodes", batch_size, inputs.max_num_seqs, "max_num_seqs")
            _require("decodes", num_blocks, inputs.num_blocks, "num_blocks")
        return tuple((batch_size, 1, num_blocks) for batch_size, num_blocks in _tuned(inputs).decodes)


def _tuned(inputs: BucketingInputs) -> TunedBuckets:
    if inputs.tuned is None:
        raise SpecError("bucketing.tuned", "is missing", "the buckets: `aotgaudi tune` writes them")
    return inputs.tuned


def _require(name: str, value: int, most: int, limit: str) -> None:
    if value > most:
        raise SpecError(
            f"bucketing.tuned.{name}", f"has {value:,}, more than {limit}", f"at most {most:,}: tune again"
        )
