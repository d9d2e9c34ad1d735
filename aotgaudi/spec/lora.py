"""Adapter slots: what a server that takes LoRA adapters adds to every graph."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.limits import LARGEST_LIMIT


class LoraSpec(SpecValue):
    """The slots of a server with --enable-lora; which adapters fill them changes no graph.

    A step's adapter mask has ``max_loras * max_lora_rank`` columns (vllm_gaudi/v1/worker/hpu_model_runner.py
    ``create_lora_mask``). `max_lora_rank` is one of vLLM's ranks (vllm/config/lora.py). `dtype`: of adapters;
    ``auto`` is the model's. `fully_sharded`: both factors of an adapter are split among ranks.
    `extra_vocab_size`: tokens that adapters may add to the vocabulary, in releases that allow it (vLLM up to 0.11).
    """

    max_loras: int = Field(default=1, ge=1, le=LARGEST_LIMIT)
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    fully_sharded: bool = False
    extra_vocab_size: int = Field(default=0, ge=0, le=LARGEST_LIMIT)
