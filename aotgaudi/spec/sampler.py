"""Which sampling settings are warm."""

from __future__ import annotations

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue


class SamplerSetting(SpecValue):
    """One setting. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 filter nothing."""

    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=0, le=2**31 - 1)


UPSTREAM_SETTINGS = tuple(
    SamplerSetting(temperature=temperature, top_p=top_p, top_k=top_k)
    for temperature, top_p, top_k in (
        (0.0, 1.0, 0),
        (1.0, 1.0, 0),
        (0.7, 0.9, 50),
        (0.3, 0.95, 20),
        (1.2, 0.8, 100),
        (0.8, 0.85, 0),
    )
)
"""What vllm-gaudi warms its sampler with (vllm_gaudi/v1/worker/hpu_model_runner.py, warmup_sampler)."""


class SamplerSpec(SpecValue):
    """The settings that the sampler is built for, in warm-up order."""

    settings: tuple[SamplerSetting, ...] = UPSTREAM_SETTINGS

    @model_validator(mode="after")
    def _check_settings(self) -> SamplerSpec:
        if not self.settings:
            raise SpecError("sampler.settings", "is empty", "at least one setting")
        for index, setting in enumerate(self.settings):
            if setting in self.settings[:index]:
                raise SpecError(
                    f"sampler.settings.{index}", "repeats an earlier setting", "each setting once"
                )
        return self
