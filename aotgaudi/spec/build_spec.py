"""The whole of what a person writes. One that exists is consistent: contradictions raise on construction."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.defrag import DefragSpec
from aotgaudi.spec.limits import ServingLimits, check_limits
from aotgaudi.spec.mhc import MhcSpec
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.sampler import SamplerSpec
from aotgaudi.spec.scheduler import SchedulerSpec, check_scheduler
from aotgaudi.spec.target import TargetSpec
from aotgaudi.spec.vision import VisionSpec

SPEC_SCHEMA = "aotgaudi.spec/1"


class BuildSpec(SpecValue):
    """A resolved spec: every default filled in, the model's config embedded; depends on no other file."""

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"scheduler"})

    schema_: Literal["aotgaudi.spec/1"] = Field(alias="schema")
    model: ModelSpec
    limits: ServingLimits
    scheduler: SchedulerSpec = SchedulerSpec()
    bucketing: BucketingSpec = BucketingSpec()
    sampler: SamplerSpec = SamplerSpec()
    defrag: DefragSpec = DefragSpec()
    mhc: MhcSpec = MhcSpec()
    vision: VisionSpec = VisionSpec()
    target: TargetSpec = TargetSpec()

    @model_validator(mode="after")
    def _check_consistency(self) -> BuildSpec:
        check_limits(self.limits)
        check_scheduler(self.scheduler, self.limits)
        if self.limits.max_model_len > self.model.max_position_embeddings:
            raise SpecError(
                "limits.max_model_len",
                f"is {self.limits.max_model_len}, more than the model's positions",
                f"at most max_position_embeddings {self.model.max_position_embeddings}",
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as a JSON value, of which ``spec.parse.spec_from_json`` makes an equal spec."""
        return self.model_dump(mode="json", by_alias=True)
