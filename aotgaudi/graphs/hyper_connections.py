"""Hyper-connections (mHC): how a sublayer reads several residual streams.

``hc_pre`` mixes the streams into the sublayer's input and computes how to write its output back. Models write it back
themselves, element by element.

In a step it is a call of an operator, which the splitter makes a piece of its own. The piece's text is that of the call's
*class*: its constants, its dtype and `n_splits`, with an open number of tokens. So one artifact serves all layers, attention
and feed-forward, and all steps of the class.

All weights, small ones included, are inputs of the graph, so an artifact depends on shapes and constants and on no
checkpoint. Everything is computed in float32, whatever the streams' dtype. Results are rounded once, at the end.
(transformers rounds `post` and `comb` first for bfloat16 streams; servers' kernels do not, and we follow them.)

The projection is summed in `n_splits` parts over K, each a run of whole blocks of 64 columns with the longer
runs first (DeepGEMM's tf32_hc_prenorm_gemm). The parts are added in order. Float32 sums in another order differ
in the last bits, so n_splits decides what a graph computes. (Only the FMA kernel of newer SGLang cuts K within
each stream.)

Legend: T tokens, H streams, D width of one, K = H * D, N = (2 + H) * H mixing weights, S parts.

Formulas: DeepSeek's TileKernels (tile_kernels/torch/mhc.py 1-86); transformers 5.23
(models/deepseek_v4/modeling_deepseek_v4.py, DeepseekV4HyperConnection, DeepseekV4DecoderLayer).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from aotgaudi.errors import CompileError
from aotgaudi.graphs.canonical import to_text
from aotgaudi.graphs.export import export
from aotgaudi.spec.hyper_connections import HyperConnections

_BLOCK = 64
_POST_MULT = 2.0
_TRACED_TOKENS = 5


class HcPreGraph(nn.Module):
    """residual [T, H, D], fn [N, K], scale [3], base [N] -> post [T, H], comb [T, H, H], layer input [T, D].

    The layer input has the residual's dtype; all else is float32.
    """

    def __init__(self, streams: HyperConnections, n_splits: int) -> None:
        super().__init__()
        self.streams, self.n_splits = streams, n_splits

    def forward(
        self, residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mixes the streams into one, and computes how to write the sublayer's output back."""
        mix = _normed_mix(residual, fn, self.n_splits, self.streams.rms_eps)
        pre, post, comb = mixing_weights(mix, scale, base, self.streams)
        return post, comb, _collapsed(residual, pre)


class _OneSequence(nn.Module):
    """The same for streams [1, T, H, D], as models have them."""

    def __init__(self, streams: HyperConnections, n_splits: int) -> None:
        super().__init__()
        self.graph = HcPreGraph(streams, n_splits)

    def forward(
        self, streams_1THD: Tensor, fn: Tensor, scale: Tensor, base: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns post [1, T, H], comb [1, T, H, H] and the sublayer's input [1, T, D]."""
        post, comb, layer_input = self.graph(streams_1THD[0], fn, scale, base)
        return post[None], comb[None], layer_input[None]


@torch.library.custom_op("aotgaudi::hc_pre", mutates_args=())
def hc_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    n_splits: int,
    iters: int,
    eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [1, T, H, D] -> post [1, T, H], comb [1, T, H, H], the sublayer's input [1, T, D]. See `HcPreGraph`."""
    sizes = HyperConnections(streams.shape[2], streams.shape[3], iters, eps, rms_eps)
    post, comb, layer_input = _OneSequence(sizes, n_splits)(streams, fn, scale, base)
    return post, comb, layer_input


@hc_pre.register_fake
def _(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *constants: object
) -> tuple[Tensor, Tensor, Tensor]:
    _, t, h, d = streams.shape
    mixes = (streams.new_empty(shape, dtype=torch.float32) for shape in ((1, t, h), (1, t, h, h)))
    post, comb = mixes
    return post, comb, streams.new_empty((1, t, d))


HC_PRE = torch.ops.aotgaudi.hc_pre.default

_PARTS = ("fn", "scale", "base", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "input_norm")
"""What a hyper-connection's module has whose `forward` we replace."""


@contextmanager
def splitting(model: nn.Module, n_splits: int) -> Iterator[None]:
    """While active, every hyper-connection of the model calls the operator, with sums in `n_splits` parts."""
    modules = [module for module in model.modules() if all(hasattr(module, part) for part in _PARTS)]
    try:
        for module in modules:
            module.forward = functools.partial(_forward, module, n_splits)
        yield
    finally:
        for module in modules:
            del module.forward


def _forward(module: Any, n_splits: int, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    constants = n_splits, module.hc_sinkhorn_iters, module.hc_eps, module.input_norm.eps
    post, comb, layer_input = HC_PRE(hidden_streams, module.fn, module.scale, module.base, *constants)
    return post, comb, layer_input


def text_of_call(call: fx.Node) -> str:
    """Returns the text of the class of a call of `HC_PRE`. Raises CompileError for operands that it does not take."""
    streams, fn, scale, base, *constants = call.args
    found = [node.meta["val"] for node in (streams, fn, scale, base) if isinstance(node, fx.Node)]
    if [value.dtype for value in found[1:]] != [torch.float32] * 3 or not all(
        value.is_contiguous() for value in found
    ):
        raise CompileError("a hyper-connection's streams are not contiguous, or its weights are not float32")
    n_splits, iters, eps, rms_eps = constants
    h, d = map(int, found[0].shape[2:])
    sizes = HyperConnections(h, d, int(str(iters)), float(str(eps)), float(str(rms_eps)))
    return class_text(sizes, int(str(n_splits)), found[0].dtype)


@functools.lru_cache(maxsize=64)
def class_text(streams: HyperConnections, n_splits: int, dtype: torch.dtype) -> str:
    """Returns the canonical text of all calls with these constants, for any number of tokens."""
    h, d, n = streams.hc_mult, streams.hidden_size, streams.num_mixes
    weights = torch.zeros(n, h * d), torch.zeros(3), torch.zeros(n)
    example = torch.zeros(1, _TRACED_TOKENS, h, d, dtype=dtype)
    dynamic = ({1: torch.export.Dim("num_tokens", min=2)}, None, None, None)
    exported = export(_OneSequence(streams, n_splits), (example, *weights), dynamic).graph_module
    exported.graph.eliminate_dead_code()
    return to_text(exported.graph)


def split_sums(x_TK: Tensor, fn_NK: Tensor, n_splits: int) -> tuple[Tensor, Tensor]:
    """Returns ``x fn^T`` [T, N] and the sums of squares of x [T], each in `n_splits` parts, added in order.

    Parts that would be empty (fewer blocks of 64 columns than `n_splits`) are left out.
    """
    padding = -x_TK.shape[1] % _BLOCK
    if padding:
        x_TK, fn_NK = F.pad(x_TK, (0, padding)), F.pad(fn_NK, (0, padding))
    products: list[Tensor] = []
    squares: list[Tensor] = []
    start = 0
    for num_parts, width in _runs(x_TK.shape[1] // _BLOCK, n_splits):
        end = start + num_parts * width
        x_TSk = x_TK[:, start:end].unflatten(1, (num_parts, width))
        fn_NSk = fn_NK[:, start:end].unflatten(1, (num_parts, width))
        products += torch.bmm(x_TSk.transpose(0, 1), fn_NSk.permute(1, 2, 0)).unbind(0)
        squares += (x_TSk * x_TSk).sum(-1).unbind(1)
        start = end
    return functools.reduce(torch.add, products), functools.reduce(torch.add, squares)


def mixing_weights(
    mix_TN: Tensor, scale: Tensor, base: Tensor, streams: HyperConnections
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns pre [T, H] in (eps, 1 + eps), post [T, H] in (0, 2) and comb [T, H, H], nearly doubly stochastic."""
    h, eps = streams.hc_mult, streams.hc_eps
    pre_TH, post_TH, comb_TM = mix_TN.split([h, h, h * h], dim=1)
    pre_base, post_base, comb_base = base.split([h, h, h * h])
    pre_TH = torch.sigmoid(pre_TH * scale[0] + pre_base) + eps
    post_TH = _POST_MULT * torch.sigmoid(post_TH * scale[1] + post_base)
    logits_THH = (comb_TM * scale[2] + comb_base).unflatten(1, (h, h))
    return pre_TH, post_TH, _sinkhorn(logits_THH, streams.sinkhorn_iters, eps)


def _sinkhorn(logits_THH: Tensor, iters: int, eps: float) -> Tensor:
    """Rows first, as a softmax, then columns; `iters` pairs in all, so it ends with the columns.

    Rows and columns sum to 1 only as far as that many steps bring them; the exact recursion is what is wanted.
    """
    comb = torch.softmax(logits_THH, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _normed_mix(residual_THD: Tensor, fn: Tensor, n_splits: int, rms_eps: float) -> Tensor:
    """Projects the flattened streams; their RMS norm, which has no weight, is applied to the result."""
    x_TK = residual_THD.flatten(1).float()
    product, squares_T = split_sums(x_TK, fn, n_splits)
    return product * torch.rsqrt(squares_T / x_TK.shape[1] + rms_eps)[:, None]


def _collapsed(residual_THD: Tensor, pre_TH: Tensor) -> Tensor:
    weighted = (pre_TH[:, i, None] * s for i, s in enumerate(residual_THD.float().unbind(1)))
    return functools.reduce(torch.add, weighted).to(residual_THD.dtype)


def _runs(num_blocks: int, n_splits: int) -> Iterator[tuple[int, int]]:
    """Yields (number of parts, columns of each): first the parts with one more block, then the others; no empty parts."""
    shorter, num_longer = divmod(num_blocks, n_splits)
    for num_parts, blocks in ((num_longer, shorter + 1), (n_splits - num_longer, shorter)):
        if num_parts and blocks:
            yield num_parts, blocks * _BLOCK
