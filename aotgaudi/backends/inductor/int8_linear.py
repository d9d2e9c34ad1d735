"""Linear layers over weights in 8 bits, in units. Offline only.

Products of few rows are a template of ours (``int8_linear.h``): what they cost is reading the weights, and half the bytes
take half the time. Where there are many rows, the weights are widened for the call, which is little beside the product,
and the product is the library's. So are products in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._inductor import lowering

from aotgaudi.backends.inductor.template import called
from aotgaudi.graphs.int8_linear import INT8_LINEAR

MOST_ROWS = 32
"""Of a product that is ours; measured, see docs/benchmarks.md."""

_TEMPLATE_DTYPES = frozenset({torch.bfloat16, torch.float16})
_aten = torch.ops.aten

_CALL = r"""
  aotgaudi::Int8Linear<{{dtype}}, {{rows}}, {{outputs}}, {{inputs_of_one}}>::run(
      source, weight, scales, {{"bias" if has_bias else "nullptr"}}, output);
"""


def _num_rows(source: Any) -> int:
    return math.prod(map(int, source.get_size()[:-1]))


def _lower(source: Any, weight: Any, scales: Any, bias: Any) -> Any:
    if _num_rows(source) > MOST_ROWS or source.get_dtype() not in _TEMPLATE_DTYPES:
        return _widened(source, weight, scales, bias)
    outputs, inputs_of_one = map(int, weight.get_size())
    return called(
        "int8_linear",
        _CALL,
        {"source": source, "weight": weight, "scales": scales, "bias": bias},
        [*source.get_size()[:-1], outputs],
        source.get_dtype(),
        rows=_num_rows(source),
        outputs=outputs,
        inputs_of_one=inputs_of_one,
        has_bias=bias is not None,
    )


def _widened(source: Any, weight: Any, scales: Any, bias: Any) -> Any:
    """The integers in the source's dtype, which holds them exactly; the product; then scales and bias in float32."""
    call, dtype = lowering.lowerings, source.get_dtype()
    *outer, inner = source.get_size()
    wide = lowering.to_dtype(weight, dtype)
    rows = call[_aten.view.default](source, [_num_rows(source), inner])
    product = call[_aten.mm.default](rows, call[_aten.permute.default](wide, [1, 0]))
    result = call[_aten.mul.Tensor](lowering.to_dtype(product, torch.float32), scales)
    if bias is not None:
        result = call[_aten.add.Tensor](result, lowering.to_dtype(bias, torch.float32))
    return call[_aten.view.default](lowering.to_dtype(result, dtype), [*outer, weight.get_size()[0]])


LOWERINGS = {INT8_LINEAR: _lower}
"""What inductor makes of the operator."""
