"""What a bucketing strategy is a function of. Frozen values; nothing is read from the environment here."""

from __future__ import annotations

from dataclasses import dataclass

from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.limits import ServingLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingSlices:
    """Sliced fused attention (upstream's PT_HPU_SDPA_QKV_SLICE_MODE_FWD).

    Queries of at least `threshold` tokens (VLLM_FUSEDSDPA_SLIDE_THLD) without context must be multiples of
    `slice_len` tokens (PT_HPU_SDPA_BC_FACTOR).
    """

    threshold: int = 8192
    slice_len: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketingInputs:
    """The numbers and modes that decide the tables. Lengths in tokens, `num_blocks` in KV blocks.

    `mamba_chunk_size`: 0 without mamba layers. `skip_decode_block_clamp`: for hybrid and interleaved
    sliding-window models, whose decode contexts are not clamped to three times the cache.
    `prompt_ctx_max`: upstream's VLLM_PROMPT_CTX_BUCKET_MAX; None where that is unset.
    """

    max_num_seqs: int
    max_num_prefill_seqs: int
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    contiguous_pa: bool = False
    merged_prefill: bool = False
    prompt_query_min_one: bool = False
    prompt_ctx_max: int | None = None
    num_speculative_tokens: int = 0
    mamba_chunk_size: int = 0
    mamba_chunk_size_is_explicit: bool = False
    skip_decode_block_clamp: bool = False
    sliding: SlidingSlices | None = None

    @classmethod
    def from_spec(cls, limits: ServingLimits, bucketing: BucketingSpec) -> BucketingInputs:
        """Returns the inputs that a spec stands for."""
        return cls(
            max_num_seqs=limits.max_num_seqs,
            max_num_prefill_seqs=limits.max_num_prefill_seqs,
            block_size=limits.block_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_blocks=limits.num_blocks,
            contiguous_pa=bucketing.contiguous_pa,
            prompt_query_min_one=bucketing.prompt_query_min_one,
            prompt_ctx_max=bucketing.prompt_ctx_max,
        )

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that a sequence of `max_model_len` tokens occupies."""
        return -(-self.max_model_len // self.block_size)

    @property
    def query_min(self) -> int:
        """The shortest prompt query that is a bucket."""
        return 1 if self.prompt_query_min_one else self.block_size


@dataclass(frozen=True, slots=True)
class Ranges:
    """The values of each dimension of one phase, ascending; a table is made from their product.

    Upstream's ranges may hold a value twice; that changes no table.
    """

    batch_sizes: tuple[int, ...]
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]


Bucket = tuple[int, int, int]
"""``(batch size, query length, context blocks)``, as upstream writes it."""
