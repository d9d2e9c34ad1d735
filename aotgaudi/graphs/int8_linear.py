"""The operator of linear layers over weights in 8 bits. Devices compile it as they can; here is what it computes."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("aotgaudi::int8_linear", mutates_args=())
def int8_linear(source: Tensor, weight_NK: Tensor, scales_N: Tensor, bias_N: Optional[Tensor]) -> Tensor:
    """A linear layer: source [..., K], weight int8, scales float32 -> [..., N] of the source's dtype.

    Computed in float32. This is the reference: a unit has code of the device's own.
    """
    weight = weight_NK.float() * scales_N[:, None]
    bias = None if bias_N is None else bias_N.float()
    return F.linear(source.float(), weight, bias).to(source.dtype)


@int8_linear.register_fake
def _(source: Tensor, weight_NK: Tensor, *_: object) -> Tensor:
    return source.new_empty((*source.shape[:-1], weight_NK.shape[0]))


INT8_LINEAR = torch.ops.aotgaudi.int8_linear.default
