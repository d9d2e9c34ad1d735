"""Linear layers and embeddings over packed weights, in units: our template ``packed_linear.h``. Offline only."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Optional

import torch
from torch import Tensor

from aotgaudi.backends.inductor.template import called

_LINEAR = r"""
  using Linear = aotgaudi::PackedLinear<{{num_rows}}, {{num_out}}, {{num_in}}>;
  Linear::run(x, weight, nullptr, {{"bias" if has_bias else "nullptr"}}, output);
"""
_EMBEDDING = r"""
  aotgaudi::PackedEmbedding<{{num_rows}}, {{num_out}}, {{num_in}}>::run(ids, table, output);
"""


@torch.library.custom_op("aotgaudi::packed_linear", mutates_args=())
def packed_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Defines the product for weights [out, in] in the order of the checkpoint. Compiled, never run."""
    return torch.nn.functional.linear(x, weight, bias)


@packed_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("aotgaudi::packed_embedding", mutates_args=())
def packed_embedding(table: Tensor, ids: Tensor) -> Tensor:
    """Defines the look-up for a table [num_embeddings, size] in the order of the checkpoint. Compiled, never run."""
    return torch.nn.functional.embedding(ids, table)


@packed_embedding.register_fake
def _(table: Tensor, ids: Tensor) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[1])


PACKED_LINEAR = torch.ops.aotgaudi.packed_linear.default
PACKED_EMBEDDING = torch.ops.aotgaudi.packed_embedding.default


def packed_product(body: str, x: Any, weight: Any, more: Mapping[str, Any]) -> Any:
    """Returns one call of the template: `body` makes the output from `x`, `weight` and `more`, which names the bias."""
    *rows, num_in = map(int, x.get_size())
    num_out = int(weight.get_size()[0])
    return called(
        "packed_linear",
        body,
        {"x": x, "weight": weight, **more},
        [*rows, num_out],
        x.get_dtype(),
        num_rows=prod(rows),
        num_out=num_out,
        num_in=num_in,
        has_bias=more["bias"] is not None,
    )


def _lower_linear(x: Any, weight: Any, bias: Any) -> Any:
    return packed_product(_LINEAR, x, weight, {"bias": bias})


def _lower_embedding(table: Any, ids: Any) -> Any:
    sizes = list(map(int, ids.get_size()))
    num_out, num_in = map(int, table.get_size())
    return called(
        "packed_linear",
        _EMBEDDING,
        {"table": table, "ids": ids},
        [*sizes, num_in],
        table.get_dtype(),
        num_rows=prod(sizes),
        num_out=num_out,
        num_in=num_in,
    )


LOWERINGS = {PACKED_LINEAR: _lower_linear, PACKED_EMBEDDING: _lower_embedding}
"""How inductor compiles the operators."""
