"""The tuned strategy: the buckets that a spec lists, as `aotgaudi tune` has chosen them. Ours, not upstream's."""

from __future__ import annotations

from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import TunedBuckets


class TunedStrategy:
    """See ``strategy.Strategy``. A bucket that no step under the limits can need is refused: it would be built in vain."""

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
        """Returns the same: nothing is added for speculation."""
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
            f"bucketing.tuned.{name}", f"has {value:,}, more than {limit}", f"at most {most:,}: tune anew"
        )
