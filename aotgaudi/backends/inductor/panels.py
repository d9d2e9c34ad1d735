"""Linear layers and embeddings over weights in panels, in units: templates of ours, ``panels.h``. Offline only."""

from __future__ import annotations

from math import prod
from typing import Any, Optional

import torch
from torch import Tensor

from aotgaudi.backends.inductor.template import called
from aotgaudi.graphs.int8_linear import INT8_LINEAR

_CALL = r"""
  using Linear = aotgaudi::Panels<{{num_rows}}, {{num_out}}, {{num_in}}>;
  Linear::run(x, weight, nullptr, {{"bias" if has_bias else "nullptr"}}, output);
"""


_CALL_INT8 = r"""
  using Linear = aotgaudi::Panels<{{num_rows}}, {{num_out}}, {{num_in}}, int8_t>;
  Linear::run(x, weight, scales, {{"bias" if has_bias else "nullptr"}}, output);
"""
_PICK = r"""
  aotgaudi::RowsOfPanels<{{num_rows}}, {{num_out}}, {{num_in}}>::run(ids, table, output);
"""


@torch.library.custom_op("aotgaudi::linear_in_panels", mutates_args=())
def linear_in_panels(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """What a product over `PANELS` computes, of weights [out, in] as they are stored: to be compiled, not to be run."""
    return torch.nn.functional.linear(x, weight, bias)


@linear_in_panels.register_fake
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("aotgaudi::int8_linear_in_panels", mutates_args=())
def int8_linear_in_panels(x: Tensor, weight: Tensor, scales: Tensor, bias: Optional[Tensor]) -> Tensor:
    """What a product over `PANELS` of integers computes, of weights [out, in] as they are made: to be compiled, not run."""
    result: Tensor = INT8_LINEAR(x, weight, scales, bias)
    return result


@int8_linear_in_panels.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, bias: Optional[Tensor]) -> Tensor:
    del scales, bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("aotgaudi::embedding_in_panels", mutates_args=())
def embedding_in_panels(table: Tensor, ids: Tensor) -> Tensor:
    """What an embedding over `PANELS` picks, of a table [num_embeddings, size] as it is stored: to be compiled, not run."""
    return torch.nn.functional.embedding(ids, table)


@embedding_in_panels.register_fake
def _(table: Tensor, ids: Tensor) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[1])


IN_PANELS = torch.ops.aotgaudi.linear_in_panels.default
INT8_IN_PANELS = torch.ops.aotgaudi.int8_linear_in_panels.default
ROWS_OF_PANELS = torch.ops.aotgaudi.embedding_in_panels.default


def _lower(x: Any, weight: Any, bias: Any) -> Any:
    return _product(_CALL, x, weight, {"bias": bias})


def _lower_int8(x: Any, weight: Any, scales: Any, bias: Any) -> Any:
    return _product(_CALL_INT8, x, weight, {"scales": scales, "bias": bias})


def _product(body: str, x: Any, weight: Any, more: dict[str, Any]) -> Any:
    *rows, num_in = map(int, x.get_size())
    num_out = int(weight.get_size()[0])
    return called(
        "panels",
        body,
        {"x": x, "weight": weight, **more},
        [*rows, num_out],
        x.get_dtype(),
        num_rows=prod(rows),
        num_out=num_out,
        num_in=num_in,
        has_bias=more["bias"] is not None,
    )


def _lower_embedding(table: Any, ids: Any) -> Any:
    sizes = list(map(int, ids.get_size()))
    num_out, num_in = map(int, table.get_size())
    return called(
        "panels",
        _PICK,
        {"table": table, "ids": ids},
        [*sizes, num_in],
        table.get_dtype(),
        num_rows=prod(sizes),
        num_out=num_out,
        num_in=num_in,
    )


LOWERINGS = {IN_PANELS: _lower, INT8_IN_PANELS: _lower_int8, ROWS_OF_PANELS: _lower_embedding}
"""What inductor makes of the operators."""
