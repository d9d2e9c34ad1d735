"""Kernels by the names that models import. Source: ``hpex/kernels/__init__.py`` of the bridge."""

from habana_frameworks.torch.hpex.kernels import mixture_of_experts
from habana_frameworks.torch.hpex.kernels.FusedSDPA import FusedSDPA
from habana_frameworks.torch.hpex.kernels.RotaryPosEmbeddingHelper import (
    RotaryPosEmbeddingMode,
    apply_rotary_pos_emb,
)

__all__ = ["FusedSDPA", "RotaryPosEmbeddingMode", "apply_rotary_pos_emb"]
