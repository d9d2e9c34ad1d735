"""What a bucketing strategy gives. ``bucketing.versions`` has those of every version."""

from __future__ import annotations

from typing import Protocol

from aotgaudi.bucketing.inputs import Bucket, BucketingInputs
from aotgaudi.bucketing.unified import UnifiedBucket


class Strategy(Protocol):
    """Gives upstream's lists exactly, order and repetitions included; stateless.

    All three raise SpecError where upstream raises, and where a table would be too large.
    """

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets."""
        ...

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, those of speculative decoding included."""
        ...

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets before those of speculative decoding are added."""
        ...


class UnifiedStrategy(Protocol):
    """Gives upstream's list for unified attention, where one step holds prompts and decodes; stateless."""

    def unified_table(self, inputs: BucketingInputs) -> tuple[UnifiedBucket, ...]:
        """Returns the unified buckets."""
        ...
