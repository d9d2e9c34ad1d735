"""Quantized weights and KV caches, as far as they decide compiled code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue

KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"]
"""vLLM's names (vllm/config/cache.py, and vllm-gaudi's ``fp8_inc``); ``auto`` is the model's dtype."""


class QuantizationSpec(SpecValue):
    """Quantization that the command asks for; a checkpoint's own is in its config's ``quantization_config``.

    `method`: vLLM's name of it, e.g. ``inc`` (--quantization). `kv_cache_dtype`: --kv-cache-dtype.
    `config_sha256`: of the canonical JSON of the file that QUANT_CONFIG names (a spec in TOML names the file as
    `config`): Intel Neural Compressor's scheme and the place of its measurements.
    """

    method: str | None = Field(default=None, min_length=1, max_length=64)
    kv_cache_dtype: KvCacheDtype = "auto"
    config_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")

    @property
    def kv_value_bytes(self) -> int | None:
        """Bytes of one number of the KV cache; None if it has the model's dtype."""
        if self.kv_cache_dtype == "auto":
            return None
        return 2 if self.kv_cache_dtype == "bfloat16" else 1

    @model_validator(mode="after")
    def _check_any(self) -> QuantizationSpec:
        if self.method is None and self.kv_cache_dtype == "auto" and self.config_sha256 is None:
            raise SpecError("model.quantization", "is empty", "method, kv_cache_dtype or config")
        return self
