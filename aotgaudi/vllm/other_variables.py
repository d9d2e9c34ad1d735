"""Variables that decide no shape: which change compiled code all the same, and which change nothing of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_CHANGES_CODE = re.compile(
    r"PT_HPU_(?!RECIPE_CACHE_CONFIG|METRICS_|ENABLE_CACHE_METRICS|MAX_COMPOUND_OP_SYNC).*"
    r"|PT_HPUGRAPH_DISABLE_TENSOR_CACHE"
    r"|VLLM_PROMPT_USE_(FUSEDSDPA|FLEX_ATTENTION)"
    r"|VLLM_HPU_(FSDPA_SLICE_.*|FORCE_CHANNEL_FP8|CONVERT_TO_FP8UZ)"
    r"|VLLM_T_COMPILE_(REGIONAL_COMPILATION|FULLGRAPH|DYNAMIC_SHAPES)"
    r"|VLLM_(MOE_CHUNK|MOE_TOKEN_BOUNDARY|ROW_PARALLEL_CHUNKS?|ROW_PARALLEL_CHUNK_THRESHOLD)"
    r"|VLLM_(CONFIG_HIDDEN_LAYERS|HANDLE_TOPK_DUPLICATES|SCALE_ADJUSTMENT|DYNAMIC_KV_QUANT|FLATTEN_INPUT)"
    r"|VLLM_(COS_SIN_RECOMPUTE|ALIBI_USE_FLOAT32_BIASES|FP32_SOFTMAX(_VISION)?|BATCH_INVARIANT)"
    r"|VLLM_(COMPACT_GDN|USE_HYBRID_CACHE|USE_NAIVE_MAMBA_CACHE_SHARING|GDN_.*|MAMBA_USE_.*|MINIMAX_M3_.*)"
    r"|VLLM_(FUSED_BLOCK_SOFTMAX(_ADJUSTMENT)?|SOFTMAX_CONST_NORM(_VALUE)?|USE_FUSED_MOE_GROUPED_TOPK)"
)
"""From the lists of vllm_gaudi/extension/features.py and the bridge's env_flags.yaml; not every one of theirs."""


@dataclass(frozen=True, slots=True)
class OtherVariables:
    """Names, in alphabetical order. `changing_code`: must be the same where graphs are built and where they run."""

    changing_code: tuple[str, ...]
    without_effect: tuple[str, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> OtherVariables:
        """Sorts names into the two."""
        ordered = sorted(names)
        code = tuple(name for name in ordered if _CHANGES_CODE.fullmatch(name))
        return cls(code, tuple(name for name in ordered if name not in code))
