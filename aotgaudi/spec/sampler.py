"""Which sampling settings are warm."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.sampler_signature import PARAMETERS, SamplerSignature, join_all, signature_of


def _value(name: str, *, is_required: bool = False) -> Any:
    """Returns the field of the parameter `name`."""
    declared = PARAMETERS[name]
    limits: dict[str, Any] = dict(declared.settings)
    return Field(**limits) if is_required else Field(default=declared.neutral, **limits)


class SamplerSetting(SpecValue):
    """One setting. Its parameters are those of `SamplingValues`; most are neutral unless it says otherwise.

    `num_logprobs`: how many of the likeliest tokens' log-probabilities are returned with the chosen token's; 0 returns none,
    not even that one. `constraints`: a mask of allowed tokens and biases, for structured output, logit_bias,
    allowed_token_ids, bad_words and min_tokens.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset(
        {"constraints", *(name for name, each in PARAMETERS.items() if each.is_late)}
    )

    temperature: float = _value("temperature", is_required=True)
    top_p: float = _value("top_p", is_required=True)
    top_k: int = _value("top_k", is_required=True)
    min_p: float = _value("min_p")
    presence_penalty: float = _value("presence_penalty")
    frequency_penalty: float = _value("frequency_penalty")
    repetition_penalty: float = _value("repetition_penalty")
    num_logprobs: int = Field(default=0, ge=0, le=20)
    constraints: bool = False
    top_n_sigma: float = _value("top_n_sigma")

    @property
    def signature(self) -> SamplerSignature:
        """The cheapest sampler graph that serves this setting."""
        return signature_of(self, logprobs=self.num_logprobs > 0, constraints=self.constraints)


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

DEFAULT_SETTINGS = (
    *UPSTREAM_SETTINGS,
    SamplerSetting(temperature=0.7, top_p=0.9, top_k=50, min_p=0.05, presence_penalty=1.0, num_logprobs=20),
    SamplerSetting(temperature=0.7, top_p=0.9, top_k=50, constraints=True),
)
"""What our own engine is built for by default: besides the plain settings, two more graphs per batch size.

One serves any mix of penalties, min-p and log-probabilities, and one serves constraints. Their join, which does everything,
is a third. So no client is refused, and no request pays for constraints that it does not have.
"""


class SamplerSpec(SpecValue):
    """The settings that the sampler is built for, in warm-up order. A spec without any gets `default_settings`.

    Requests may ask for anything that some setting has, in any combination (`signature`, `num_logprobs`).
    `smallest_batch_size`: 1, or 0 to reproduce vllm-gaudi before v0.16, which also warms an empty batch.
    """

    smallest_batch_size: Literal[0, 1] = 1
    settings: tuple[SamplerSetting, ...] = UPSTREAM_SETTINGS

    @property
    def signature(self) -> SamplerSignature:
        """What all settings together need: a request is legal if this serves it."""
        return join_all(setting.signature for setting in self.settings)

    @property
    def num_logprobs(self) -> int:
        """The most log-probabilities of likeliest tokens that a request may ask for."""
        return max(setting.num_logprobs for setting in self.settings)

    @model_validator(mode="after")
    def _check_settings(self) -> SamplerSpec:
        if not self.settings:
            raise SpecError("sampler.settings", "is empty", "at least one setting")
        seen: set[SamplerSetting] = set()
        for index, setting in enumerate(self.settings):
            if setting in seen:
                raise SpecError(
                    f"sampler.settings.{index}", "repeats an earlier setting", "each setting once"
                )
            seen.add(setting)
        return self


def default_settings(engine: str) -> tuple[SamplerSetting, ...]:
    """Returns the settings of a spec that names none: a vLLM server warms up its own."""
    return DEFAULT_SETTINGS if engine == "aotgaudi" else UPSTREAM_SETTINGS
