"""Linear layers over quantized weights, in units: how inductor compiles each quantization's operator. Offline only.

int8: products of few rows are our template ``int8_linear.h``. Such a product costs what reading its weights costs, and half
the bytes take half the time. With many rows, the weights are widened for the call, which costs little next to the product,
and the product is the library's; so are products in float32. Where weights are packed for AVX512_BF16, ``packed_linear.h``
reads the integers.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor
from torch._inductor import lowering

from aotgaudi.backends.inductor.packed_linear import packed_product
from aotgaudi.backends.inductor.template import called
from aotgaudi.graphs.quantized_linear import INT8_LINEAR

MOST_ROWS = 32
"""The most rows of an int8 product that our template computes; measured, see docs/benchmarks.md."""

_TEMPLATE_DTYPES = frozenset({torch.bfloat16, torch.float16})
_aten = torch.ops.aten

_INT8 = r"""
  aotgaudi::Int8Linear<{{dtype}}, {{rows}}, {{outputs}}, {{inputs_of_one}}>::run(
      source, weight, scales, {{"bias" if has_bias else "nullptr"}}, output);
"""
_PACKED_INT8 = r"""
  using Linear = aotgaudi::PackedLinear<{{num_rows}}, {{num_out}}, {{num_in}}, int8_t>;
  Linear::run(x, weight, scales, {{"bias" if has_bias else "nullptr"}}, output);
"""


@torch.library.custom_op("aotgaudi::packed_int8_linear", mutates_args=())
def packed_int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Defines the product for integers [out, in] in the order of the checkpoint. Compiled, never run."""
    result: Tensor = INT8_LINEAR(x, weight, scales, bias)
    return result


@packed_int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor, bias: Optional[Tensor]) -> Tensor:
    del scales, bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


PACKED_INT8_LINEAR = torch.ops.aotgaudi.packed_int8_linear.default

PACKED_FORMS = {INT8_LINEAR: PACKED_INT8_LINEAR}
"""Operators whose first weight tensor can be packed for AVX512_BF16 (linear.py), and the operator that takes it so."""


def _num_rows(source: Any) -> int:
    return math.prod(map(int, source.get_size()[:-1]))


def _lower_int8(source: Any, weight: Any, scales: Any, bias: Any) -> Any:
    if _num_rows(source) > MOST_ROWS or source.get_dtype() not in _TEMPLATE_DTYPES:
        return _widened(source, weight, scales, bias)
    outputs, inputs_of_one = map(int, weight.get_size())
    return called(
        "int8_linear",
        _INT8,
        {"source": source, "weight": weight, "scales": scales, "bias": bias},
        [*source.get_size()[:-1], outputs],
        source.get_dtype(),
        rows=_num_rows(source),
        outputs=outputs,
        inputs_of_one=inputs_of_one,
        has_bias=bias is not None,
    )


def _widened(source: Any, weight: Any, scales: Any, bias: Any) -> Any:
    """Widens the integers to the source's dtype, which holds them exactly, multiplies, then scales and adds in float32."""
    call, dtype = lowering.lowerings, source.get_dtype()
    *outer, inner = source.get_size()
    wide = lowering.to_dtype(weight, dtype)
    rows = call[_aten.view.default](source, [_num_rows(source), inner])
    product = call[_aten.mm.default](rows, call[_aten.permute.default](wide, [1, 0]))
    result = call[_aten.mul.Tensor](lowering.to_dtype(product, torch.float32), scales)
    if bias is not None:
        result = call[_aten.add.Tensor](result, lowering.to_dtype(bias, torch.float32))
    return call[_aten.view.default](lowering.to_dtype(result, dtype), [*outer, weight.get_size()[0]])


def _lower_packed_int8(x: Any, weight: Any, scales: Any, bias: Any) -> Any:
    return packed_product(_PACKED_INT8, x, weight, {"scales": scales, "bias": bias})


LOWERINGS = {INT8_LINEAR: _lower_int8, PACKED_INT8_LINEAR: _lower_packed_int8}
"""How inductor compiles the operators."""
