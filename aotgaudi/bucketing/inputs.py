"""What a bucketing strategy is a function of. Frozen values; nothing is read from the environment here."""

from __future__ import annotations

from dataclasses import dataclass, field

from aotgaudi.spec.bucketing import BucketingSpec, DecodeBounds, PromptBounds, SlidingSpec
from aotgaudi.spec.limits import ServingLimits

Bucket = tuple[int, int, int]
"""``(batch size, query length, context blocks)``, as upstream writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketingInputs:
    """The numbers and modes that decide the tables. Lengths in tokens, `num_blocks` in KV blocks.

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
            prefix_caching=bucketing.prefix_caching,
            merged_prefill=bucketing.merged_prefill,
            num_speculative_tokens=bucketing.num_speculative_tokens,
            mamba_chunk_size=bucketing.mamba_chunk_size,
            mamba_chunk_size_is_explicit=bucketing.mamba_chunk_size_is_explicit,
            skip_decode_block_clamp=bucketing.skip_decode_block_clamp,
            sliding=bucketing.sliding,
            prompt=bucketing.prompt,
            decode=bucketing.decode,
            file_text=bucketing.file_text,
        )

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that a sequence of `max_model_len` tokens occupies."""
        return -(-self.max_model_len // self.block_size)

    @property
    def query_min(self) -> int:
        """The shortest prompt query that is a bucket: a block, or 1 where a person says so."""
        return 1 if self.prompt.query_len.min == 1 else self.block_size

    @property
    def prompt_ctx_max(self) -> int | None:
        """Upstream's VLLM_PROMPT_CTX_BUCKET_MAX; None where that is unset."""
        return self.prompt.num_ctx_blocks.max


@dataclass(frozen=True, slots=True)
class Ranges:
    """The values of each dimension of one phase, ascending; a table is made from their product.

    Upstream's ranges may hold a value twice; that changes no table.
    """

    batch_sizes: tuple[int, ...]
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
