"""Linear layers over weights in panels, in units: a template of ours, ``panels.h``. Offline only."""

from __future__ import annotations

from math import prod
from typing import Any, Optional

import torch
from torch import Tensor

from aotgaudi.backends.inductor.template import called

_CALL = r"""
  using Linear = aotgaudi::Panels<{{num_rows}}, {{num_out}}, {{num_in}}>;
  Linear::run(x, weight, {{"bias" if has_bias else "nullptr"}}, output);
"""


@torch.library.custom_op("aotgaudi::linear_in_panels", mutates_args=())
def linear_in_panels(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """What a product over `PANELS` computes, of weights [out, in] as they are stored: to be compiled, not to be run."""
    return torch.nn.functional.linear(x, weight, bias)


@linear_in_panels.register_fake
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


IN_PANELS = torch.ops.aotgaudi.linear_in_panels.default


def _lower(x: Any, weight: Any, bias: Any) -> Any:
    *rows, num_in = map(int, x.get_size())
    num_out = int(weight.get_size()[0])
    return called(
        "panels",
        _CALL,
        {"x": x, "weight": weight, "bias": bias},
        [*rows, num_out],
        x.get_dtype(),
        num_rows=prod(rows),
        num_out=num_out,
        num_in=num_in,
        has_bias=bias is not None,
    )


LOWERINGS = {IN_PANELS: _lower}
"""What inductor makes of the operator."""
