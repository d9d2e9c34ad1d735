"""Quantization of weights and KV caches, as far as it decides compiled code."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue

KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"]
"""vLLM's names (vllm/config/cache.py, and vllm-gaudi's ``fp8_inc``). ``auto`` is the model's dtype."""


WeightsDtype = Literal["int8"]
"""Quantizations of linear layers' weights that our server applies when it loads a model (``graphs/quantization.py``)."""


class QuantizationSpec(SpecValue):
    """Quantization that a spec or a vLLM command requests. A quantized checkpoint states its ``quantization_config``.

    Our server applies `weights` when it loads an unquantized checkpoint; ``quantization = "int8"`` is short for it.
    The other fields are vLLM's: `method` is --quantization, e.g. ``inc``; `kv_cache_dtype` is --kv-cache-dtype;
    `config_sha256` is the digest of the canonical JSON of the file that QUANT_CONFIG names (a spec in TOML names the
    file as `config`). That file has Intel Neural Compressor's scheme and the location of its measurements.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"weights"})

    weights: WeightsDtype | None = None
    method: str | None = Field(default=None, min_length=1, max_length=64)
    kv_cache_dtype: KvCacheDtype = "auto"
    config_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")

    @property
    def kv_value_bytes(self) -> int | None:
        """Bytes per number of the KV cache; None if it has the model's dtype."""
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
