"""Quantized weights and KV caches, as far as they decide compiled code."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue

KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"]
"""vLLM's names (vllm/config/cache.py, and vllm-gaudi's ``fp8_inc``); ``auto`` is the model's dtype."""


WeightsDtype = Literal["int8"]
"""What linear layers' weights are rounded to when they are loaded, one scale an output channel."""


class QuantizationSpec(SpecValue):
    """Quantization that a spec, or a vLLM command, asks for; a checkpoint's own is in its ``quantization_config``.

    `weights` is what our server does when it loads a checkpoint that is not quantized; ``quantization = "int8"`` is short
    for it. The rest is of vLLM: `method`, its name, e.g. ``inc`` (--quantization); `kv_cache_dtype`: --kv-cache-dtype;
    `config_sha256`: of the canonical JSON of the file that QUANT_CONFIG names (a spec in TOML names the file as
    `config`): Intel Neural Compressor's scheme and the place of its measurements.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"weights"})

    weights: WeightsDtype | None = None
    method: str | None = Field(default=None, min_length=1, max_length=64)
    kv_cache_dtype: KvCacheDtype = "auto"
    config_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")

    @property
    def kv_value_bytes(self) -> int | None:
        """Bytes of one number of the KV cache; None if it has the model's dtype."""
        if self.kv_cache_dtype == "auto":
            return None
        return 2 if self.kv_cache_dtype == "bfloat16" else 1

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in get_args(WeightsDtype):
            names = " or ".join(f'"{name}"' for name in get_args(WeightsDtype))
            raise SpecError(
                "model.quantization", f"is {value!r:.60}", f"should be {names}, or a table of vLLM's"
            )
        return {"weights": value}

    @model_validator(mode="after")
    def _check_any(self) -> QuantizationSpec:
        of_vllm = (self.method, None if self.kv_cache_dtype == "auto" else True, self.config_sha256)
        if self.weights is None and not any(of_vllm):
            raise SpecError(
                "model.quantization", "is empty", 'weights = "int8"; or method, kv_cache_dtype or config'
            )
        if self.weights is not None and any(of_vllm):
            raise SpecError(
                "model.quantization.weights",
                "is our own server's, and method, kv_cache_dtype and config are vLLM's",
                "one or the other",
            )
        return self
