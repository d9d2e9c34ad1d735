"""Sample inputs for checking a compiled graph against eager, made from the graph's input shapes alone.

Floats keep activations of order one: matrices are scaled by their fan-in, vectors lie around one. Masks
see at least the first position. Integers are indices into something of unknown size, so they start at 0,
which always fits, and each is replaced by a permutation as large as eager accepts: distinct slots, so that
no write depends on an order.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

InputSpec = tuple[str, list[int], list[int]]

_INDEX_BOUNDS = (1 << 16, 256, 16, 4, 2)


def sample_inputs(graph: fx.GraphModule, specs: list[InputSpec], seed: int) -> list[Tensor]:
    """Returns one tensor an input, with its dtype, sizes and strides."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [_strided(_sample(spec, generator), spec) for spec in specs]
    for position, spec in enumerate(specs):
        if spec[0] in ("int64", "int32"):
            _spread(graph, inputs, position, generator)
    return inputs


def _sample(spec: InputSpec, generator: torch.Generator) -> Tensor:
    name, sizes, _ = spec
    dtype = getattr(torch, name)
    if dtype is torch.bool:
        mask = torch.rand(sizes, generator=generator) < 0.7
        mask[..., :1] = True
        return mask
    if dtype is torch.float64:
        return torch.rand(sizes, generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.zeros(sizes, dtype=dtype)
    noise = torch.randn(sizes, generator=generator)
    if len(sizes) == 1:
        return (1 + 0.1 * noise).to(dtype)
    return (noise * (sizes[-1] ** -0.5 if len(sizes) == 2 and min(sizes) > 32 else 0.5)).to(dtype)


def _strided(value: Tensor, spec: InputSpec) -> Tensor:
    _, sizes, strides = spec
    out = torch.empty_strided(sizes, strides, dtype=value.dtype)
    return out.copy_(value)


def _spread(graph: fx.GraphModule, inputs: list[Tensor], position: int, generator: torch.Generator) -> None:
    """Replaces the zeros of one integer input by distinct indices, as large as eager accepts."""
    zeros = inputs[position]
    for bound in (zeros.numel(), *_INDEX_BOUNDS):
        if bound < zeros.numel() and bound > 4:
            continue
        values = torch.randperm(bound, generator=generator)[: zeros.numel()]
        inputs[position] = (
            values.repeat(-(-zeros.numel() // bound))[: zeros.numel()].view(zeros.shape).to(zeros.dtype)
        )
        try:
            graph(*[value.clone() for value in inputs])
        except (IndexError, RuntimeError):
            continue
        return
    inputs[position] = zeros
