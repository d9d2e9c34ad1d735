"""The scheduler's limits, which make the set of reachable steps finite."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue

LARGEST_LIMIT = 2**31 - 1
"""Block tables and positions are 32-bit integers on every device."""


class ServingLimits(SpecValue):
    """Limits of one server. Lengths in tokens; `num_blocks` counts usable KV blocks, padding block excluded.

    The KV cache of a layer holds ``num_blocks + 1`` blocks of `block_size` tokens; block 0 is padding. If a spec leaves out
    `num_blocks`, it is what `max_num_seqs` sequences of `max_model_len` need, and one more for vLLM's null block.
    `allow_long_max_model_len` (VLLM_ALLOW_LONG_MAX_MODEL_LEN): `max_model_len` may exceed the model's positions.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"allow_long_max_model_len"})

    max_num_seqs: int = Field(ge=1, le=LARGEST_LIMIT)
    max_num_prefill_seqs: int = Field(default=1, ge=1, le=LARGEST_LIMIT)
    max_num_batched_tokens: int = Field(ge=1, le=LARGEST_LIMIT)
    max_model_len: int = Field(ge=2, le=LARGEST_LIMIT)
    block_size: int = Field(ge=1, le=LARGEST_LIMIT)
    num_blocks: int = Field(default_factory=int, ge=1, le=LARGEST_LIMIT)  # 0 until a spec fills it in.
    allow_long_max_model_len: bool = False

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that a sequence of `max_model_len` tokens occupies."""
        return -(-self.max_model_len // self.block_size)

    def with_num_blocks(self, *, has_null_block: bool) -> ServingLimits:
        """Returns limits with a number of blocks: what they say, or else what their sequences need. Raises SpecError."""
        if "num_blocks" in self.model_fields_set:
            return self
        num_blocks = self.max_num_seqs * self.max_blocks_per_seq + has_null_block
        if num_blocks > LARGEST_LIMIT:
            raise SpecError(
                "limits.num_blocks",
                f"is left out, and max_num_seqs {self.max_num_seqs} sequences of max_model_len {self.max_model_len} need"
                f" {num_blocks}",
                f"a number, at most {LARGEST_LIMIT}",
            )
        return self.model_copy(update={"num_blocks": num_blocks})


def check_limits(limits: ServingLimits, *, is_ours: bool = True) -> None:
    """Raises SpecError if the limits contradict each other, so that some request could never be served.

    `is_ours`: they are those of our own scheduler; vllm-gaudi takes a prompt batch above its sequences.
    """
    if limits.max_num_batched_tokens < limits.block_size:
        raise SpecError(
            "limits.max_num_batched_tokens",
            f"is {limits.max_num_batched_tokens}, less than block_size {limits.block_size}",
            "a prompt is computed in chunks of whole blocks: at least block_size tokens a step",
        )
    if is_ours and limits.max_num_prefill_seqs > limits.max_num_seqs:
        raise SpecError(
            "limits.max_num_prefill_seqs",
            f"is {limits.max_num_prefill_seqs}, more than max_num_seqs {limits.max_num_seqs}",
            "at most max_num_seqs",
        )
    if limits.max_blocks_per_seq > limits.num_blocks:
        raise SpecError(
            "limits.num_blocks",
            f"is {limits.num_blocks}, too few for a sequence of max_model_len {limits.max_model_len} tokens",
            f"at least {limits.max_blocks_per_seq} blocks of {limits.block_size} tokens,"
            f" or a max_model_len of at most {limits.num_blocks * limits.block_size}",
        )
