"""D-28: RMS norm as one operator, which gives the inverse root, too. Source: ``hpex/normalization/FusedRMSNorm.py``."""

from __future__ import annotations

from typing import Any

import torch

_LIBRARY = torch.library.Library("hpu", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)")


class FusedRMSNorm(torch.autograd.Function):
    """The norm over the last dimension, without a backward: nothing here trains."""

    @staticmethod
    def forward(
        ctx: Any,
        data_in: torch.Tensor,
        gamma: torch.Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> torch.Tensor:
        """Returns the normed rows."""
        del ctx, use_stages, bwd_mode, fast_math
        found: torch.Tensor = torch.ops.hpu.rms_norm(data_in, gamma, eps)[0]
        return found


def _run(data, gamma, epsilon):  # type: ignore[no-untyped-def]
    inverse = torch.rsqrt(data.float().square().mean(-1, keepdim=True) + epsilon)
    return (data.float() * inverse).to(data.dtype) * gamma.to(data.dtype), inverse


def _fake(data, gamma, epsilon):  # type: ignore[no-untyped-def]
    del gamma, epsilon
    return torch.empty_like(data), data.new_empty((*data.shape[:-1], 1), dtype=torch.float32)


_LIBRARY.impl("rms_norm", _run, "CPU")
_LIBRARY.impl("rms_norm", _fake, "Meta")

__all__ = ["FusedRMSNorm"]
