"""Sample inputs for checking a compiled graph against eager, made from the graph's input shapes alone.

Floats keep activations of order one, so that rounding stays small against the results. Weights, those of experts included,
are scaled by their fan-in; vectors lie around one; quantized weights are packed from such weights. Masks see at least the
first position; those in bits have random bits. Other integers are indices into something of unknown size: they start at 0,
which always fits, and each is replaced by a permutation as large as eager accepts, so that slots are distinct and no write
depends on an order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from aotgaudi.graphs.canonical import InputSpec, closed, is_open
from aotgaudi.graphs.quantized_linear import quantization_called

ClosedSpec = tuple[str, list[int], list[int]]

_DISTINCT_BOUNDS = (1 << 16, 256, 16)
_DISTINCT_BLOCKS = 128

_CACHE_DIMENSIONS = 5
_TOKEN_COUNTS = (5, 1, 2, 65)
"""By seed, where any number of tokens is taken. Compiling uses the first."""

_DISTINCT_VALUES = 1_048_583
"""A large tensor, such as an embedding, repeats this many random values: drawing each value would cost more than compiling
the unit. The number is prime, so that no two rows begin at the same value."""

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {_aten.linear.default, _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.matmul.default}
)
_REARRANGED = frozenset(
    {
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.index.Tensor,
        _aten.to.dtype,
        _aten.view.default,
        _aten.slice.Tensor,
    }
)
"""Operators that may lie between a weight and its product. Experts are selected by an index, and the weight that expands
latents is cut into its halves."""


def example_inputs(specs: list[InputSpec], seed: int) -> list[Tensor]:
    """Returns a tensor of zeros for each input, with its dtype, sizes and strides, for callers that ignore the numbers."""
    return [_strided(torch.zeros((), dtype=getattr(torch, spec[0])), spec) for spec in _closed(specs, seed)]


def sample_inputs(graph: fx.GraphModule, specs: list[InputSpec], seed: int) -> list[Tensor]:
    """Returns a tensor for each input, with its dtype, sizes and strides. Each seed has another number of KV blocks."""
    generator = torch.Generator().manual_seed(seed)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [
        _strided(_sample(spec, _is_weight(node, spec), generator), spec)
        for node, spec in zip(placeholders, _closed(specs, seed), strict=True)
    ]
    _pack_weights(graph.graph, placeholders, inputs, generator)
    num_blocks = [value.shape[1] for value, spec in zip(inputs, specs, strict=True) if is_open(spec)]
    for position, (node, spec) in enumerate(zip(placeholders, specs, strict=True)):
        if spec[0] == "int32" and _reaches_bits(node):
            _randomise_bits(inputs[position], generator)
        elif spec[0] in ("int64", "int32"):
            _spread(graph, inputs, position, (*num_blocks[:1], 4, 2), generator)
    return inputs


def has_open_tokens(specs: list[InputSpec]) -> bool:
    """Whether a graph takes any number of tokens, and not of a cache's blocks."""
    return any(is_open(spec) and len(spec[1]) != _CACHE_DIMENSIONS for spec in specs)


def _closed(specs: list[InputSpec], seed: int) -> list[ClosedSpec]:
    """Gives the caches few blocks: enough for distinct indices, up to 256, and for the slots of a prompt. Or few tokens."""
    if has_open_tokens(specs):
        n = _TOKEN_COUNTS[seed % len(_TOKEN_COUNTS)]
        return [(name, closed(sizes, n), closed(strides, n)) for name, sizes, strides in specs]
    longest = max((math.prod(closed(sizes, 1)) for name, sizes, _ in specs if name == "int64"), default=1)
    block_size = max((int(spec[1][3]) for spec in specs if is_open(spec)), default=1)
    n = 2 + seed + max(2 * min(longest, _DISTINCT_BLOCKS), -(-longest // block_size))
    return [(name, closed(sizes, n), closed(strides, n)) for name, sizes, strides in specs]


def _pack_weights(
    graph: fx.Graph, placeholders: list[fx.Node], inputs: list[Tensor], generator: torch.Generator
) -> None:
    """Makes the inputs of quantized linear layers of weights that are packed as a server packs them."""
    numbers = {node: number for number, node in enumerate(placeholders)}
    packed: set[int] = set()
    for node in graph.nodes:
        quantization = quantization_called(node)
        if quantization is None:
            continue
        _, *weights, _ = node.args
        mine = [numbers[weight] for weight in weights]
        if packed.isdisjoint(mine):
            packed.update(mine)
            sizes = list(quantization.unpack(*(inputs[number].to("meta") for number in mine)).shape)
            weight = _sample(("bfloat16", sizes, []), is_weight=True, generator=generator)
            for number, tensor in zip(mine, quantization.pack(weight, node.name), strict=True):
                inputs[number] = tensor


def _is_weight(node: fx.Node, spec: ClosedSpec) -> bool:
    """Whether an input is multiplied directly, and is no cache (caches have more dimensions)."""
    if len(spec[1]) not in (2, 3):
        return False
    return _reaches_product(node)


def _reaches_product(node: fx.Node) -> bool:
    return any(
        user.target in _PRODUCTS or (user.target in _REARRANGED and _reaches_product(user))
        for user in node.users
    )


def _reaches_bits(node: fx.Node) -> bool:
    """Whether an input is a mask in bits."""
    return any(user.target is _aten.bitwise_and.Tensor or _reaches_bits(user) for user in node.users)


def _randomise_bits(words: Tensor, generator: torch.Generator) -> None:
    """Sets half of all bits, and at least one of each row."""
    words.random_(-(2**31), 2**31, generator=generator)
    words[..., :1] |= 1


def _sample(spec: ClosedSpec, is_weight: bool, generator: torch.Generator) -> Tensor:
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
    num_values = math.prod(sizes)
    noise = torch.randn(min(num_values, _DISTINCT_VALUES), generator=generator)
    if len(sizes) < 2:
        some = 1 + 0.1 * noise
    else:
        fan_in = sizes[-1] if len(sizes) == 2 else max(sizes[-2:])
        some = noise * (fan_in**-0.5 if is_weight else 0.5)
    return some.to(dtype).repeat(-(-num_values // max(1, len(some))))[:num_values].view(sizes)


def _strided(value: Tensor, spec: ClosedSpec) -> Tensor:
    _, sizes, strides = spec
    out = torch.empty_strided(sizes, strides, dtype=value.dtype)
    return out.copy_(value)


def _spread(
    graph: fx.GraphModule,
    inputs: list[Tensor],
    position: int,
    repeated_bounds: tuple[int, ...],
    generator: torch.Generator,
) -> None:
    """Replaces the zeros of one integer input by indices as large as eager accepts, and distinct if they fit."""
    zeros = inputs[position]
    distinct_bounds = [bound for bound in (zeros.numel(), *_DISTINCT_BOUNDS) if bound >= zeros.numel()]
    for bound in (*distinct_bounds, *repeated_bounds):
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
