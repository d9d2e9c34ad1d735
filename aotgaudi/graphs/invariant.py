"""Batch invariance: a row's result has one order of operations, whatever else is in the step.

The order of a sum can depend on a shape: a library's matrix product takes another kernel for one row than for sixteen, and
splits work by the number of threads. So in this mode

* no library computes a sum. Products are written as multiply and add, which inductor turns into loops of the artifact: one
  loop over the summed dimension for each element of the result, the same whatever the other sizes are;
* activations are float32, whatever the dtype of weights, cache and logits. A compiler rounds to bfloat16 where it stores
  a value and not where it fuses, and fusion depends on shapes. So values are rounded only where they are stored anyway: in
  the cache, from which a prompt reads its new keys too, and as logits;
* sums along a row are made by lanes (`row_sum`), in an order that the graph itself states;
* sums over blocks of a context run from the first block to the last. A block that a row does not see adds 0, which
  changes nothing wherever it stands;
* functions with one code for vectors and another for single numbers are not called, because the shape decides which code a
  loop gets. `exp` is written out in additions and products, which are exact to the bit either way, and others are made
  of it. Rarely used functions are computed in float64 and rounded.

`batch_invariant` replaces the functions that a model's code calls while it is traced. `require_invariant` refuses a graph
with an operator that is not known to treat each row by itself. To change how a linear layer or attention is computed, change
the forms below and keep the rule.

Attention does the same for each query, in prompts and in decode steps. Keys and values are read from the blocks of the
cache, also those of a prompt's new tokens. Loops whose sizes do not depend on the step compute a query's scores with a
block, and the block's part of the output and of the total. The parts are added from the first block to the last. So a
token's result does not depend on whether a prompt or a decode step computed it, in which chunk, after how many padded
blocks, or next to which rows: a preempted request that is computed again gets what it had. The largest score, which is
subtracted before exponentials, is exact in any order.

Legend of shape suffixes: see `mixers/base.py`; n blocks (for a prompt row c of cached context, then its new ones),
X = D + 1: the part of the output, then that of the total.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from aotgaudi.errors import SpecError
from aotgaudi.graphs.layer_reuse import MARKER
from aotgaudi.graphs.mixers.base import Masks, PagedState, mask_for
from aotgaudi.graphs.mixers.uniform import (
    AttentionCall,
    DecodeState,
    PromptState,
    UniformMixer,
    softcapped,
    write_cache,
)
from aotgaudi.graphs.paged_decode import MASKED
from aotgaudi.graphs.sample_tokens import SAMPLE_TOKENS

_ROWS_AT_ONCE = 8
"""Rows of a linear layer that share one pass over its weights, so that each weight is loaded and converted once for
them. This decides speed only: every row has its accumulator."""

_LANES = 16
_LEAST, _MOST = -87.3, 88.0

_aten = torch.ops.aten
_ROW_WISE = frozenset(
    {
        _aten.amax.default,
        _aten.argmax.default,
        _aten.topk.default,
        _aten.cumsum.default,
        _aten.sum.dim_IntList,
        _aten.all.dim,
        _aten.any.dim,
        _aten.gather.default,
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.embedding.default,
        _aten.index_put_.default,
        _aten.cat.default,
        _aten.stack.default,
        _aten.pad.default,
        _aten.constant_pad_nd.default,
        _aten.clone.default,
        _aten.repeat_interleave.self_int,
        _aten.arange.default,
        _aten.arange.start,
        _aten.arange.start_step,
        _aten.zeros.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full.default,
        _aten.full_like.default,
        _aten.scalar_tensor.default,
        _aten.scatter_add.default,
        _aten.lift_fresh_copy.default,
        _aten.detach_.default,
        _aten.floor_divide.default,
        _aten.__or__.Tensor,
        _aten.type_as.default,
        _aten.dropout.default,
        MARKER,
        _aten.where.ScalarOther,
        _aten.where.ScalarSelf,
        _aten.where.Scalar,
        _aten._assert_tensor_metadata.default,
        SAMPLE_TOKENS,
    }
)
"""Operators that are neither pointwise nor views and yet treat rows one by one, in one order: maxima are exact, picking and
placing compute nothing, `cumsum` and `topk` go through a row from its start. `sum` is here for integers and for the loops of
the forms below; a model's own float sums are rewritten before. `scatter_add` is for biases, of which a token has one."""


class batch_invariant(TorchFunctionMode):  # noqa: N801 - used as a context manager, like torch's own modes
    """While active, functions that sum are replaced by their invariant forms. For tracing; does not nest."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the invariant form of `func`, or `func` itself."""
        form = _FORMS.get(getattr(func, "__name__", ""), func)
        return form(*args, **(kwargs or {}))


_TWO_CODES = frozenset(
    getattr(_aten, name).default
    for name in (
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "silu",
        "erf",
        "softplus",
    )
) | {_aten.gelu.default, _aten.log_sigmoid.default, _aten.mish.default}
"""Pointwise functions with two codes: allowed only in float64, whose results are rounded."""


def _is_row_wise(node: fx.Node) -> bool:
    target = node.target
    if target in _TWO_CODES:
        return bool(node.meta["val"].dtype == torch.float64)
    return isinstance(target, torch._ops.OpOverload) and (
        target.is_view or torch.Tag.pointwise in target.tags or target in _ROW_WISE
    )


def require_invariant(graph: fx.Graph, where: str) -> None:
    """Raises SpecError, naming `where`, for an operator that is not known to treat each row by itself."""
    for node in graph.nodes:
        is_operator = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
        if is_operator and not _is_row_wise(node):
            raise SpecError(
                "model.batch_invariant",
                f"{where}: {node.target} has no batch-invariant form",
                "another architecture, or false",
            )


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Returns ``x @ weight.T + bias`` in float32."""
    rows_TK = x.reshape(-1, x.shape[-1]).float()
    num_rows = rows_TK.shape[0]
    at_once = max(n for n in range(1, _ROWS_AT_ONCE + 1) if num_rows % n == 0)
    tiles, weight = rows_TK.view(-1, at_once, x.shape[-1]), weight_NK.float()
    sums = [(tiles[:, row, None, :] * weight).sum(-1) for row in range(at_once)]
    out = torch.stack(sums, dim=1).view(*x.shape[:-1], -1)
    return out if bias_N is None else out + bias_N.float()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a @ b.mT`` in float32: sums along the last dimension of both."""
    return row_sum(a.float()[..., :, None, :] * b.float()[..., None, :, :])


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Returns ``weights @ values`` in float32: adds the rows of `values` from first to last."""
    return (weights.float()[..., None] * values.float()[..., None, :, :]).sum(-2)


def row_sum(x: Tensor) -> Tensor:
    """Returns the sums of the last dimension, in float32: lane by lane, then the lanes by halves."""
    lanes = x.float()
    if x.shape[-1] > 1:
        padded = F.pad(lanes, (0, -x.shape[-1] % _LANES))
        lanes = padded.unflatten(-1, (-1, _LANES)).sum(-2)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def exp(x: Tensor) -> Tensor:
    """Returns the exponential in float32, by additions and products: 0 below -87.3, capped at 88.

    Cephes' expf (netlib.org/cephes, single/expf.c): the nearest power of two, times a polynomial of the remainder.
    """
    bounded = x.float().clamp(_LEAST, _MOST)
    power = torch.round(bounded * 1.44269504088896341)
    rest = bounded - power * 0.693359375 - power * -2.12194440e-4
    series = rest * 1.9875691500e-4
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1):
        series = (series + coefficient) * rest
    value = (series + 5.0000001201e-1) * (rest * rest) + rest + 1.0
    scale = ((power.to(torch.int32) + 127) * (1 << 23)).view(torch.float32)
    return torch.where(x.float() < _LEAST, 0.0, value * scale)


def _by_float64(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns ``function`` in float32, computed in float64: its two codes then agree after all but one rounding in 2**28."""
    return lambda x: function(x.double()).float()


def tanh(x: Tensor) -> Tensor:
    """Returns the hyperbolic tangent in float32."""
    return 1.0 - 2.0 / (exp(2.0 * x.float()) + 1.0)


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + exp(-x.float()))


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return x.float() / (1.0 + exp(-x.float()))


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    x = x.float()
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + _by_float64(torch.erf)(x * 0.7071067811865476))


def softmax(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the softmax over the last dimension."""
    _require_last(x, dim, "softmax")
    scores = x.float()
    weights = exp(scores - scores.amax(-1, keepdim=True))
    return (weights / row_sum(weights)[..., None]).to(dtype or x.dtype)


def logsumexp(x: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
    """Returns the logarithm of the sum of exponentials over the last dimension."""
    _require_last(x, dim, "logsumexp")
    top = x.float().amax(-1, keepdim=True)
    total = _by_float64(torch.log)(row_sum(exp(x.float() - top))[..., None]) + top
    return total if keepdim else total[..., 0]


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Sums along the dimension of `b` that is contiguous in memory."""
    if a.dim() == 1 or b.dim() == 1:
        raise SpecError("model.batch_invariant", "a product of a vector has no batch-invariant form", "false")
    if a.shape[-1] == 1:
        return a * b
    if not a.is_floating_point():
        return torch.matmul(a, b)  # Refused later.
    return dot(a, b.mT) if b.shape[-1] == 1 or b.stride(-2) == 1 else weighted(a, b)


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return bias.float() + weighted(a, b)


def _embedding(input_ids: Tensor, weight: Tensor, padding_idx: int | None = None, **options: Any) -> Tensor:
    return F.embedding(input_ids, weight, padding_idx, **options).float()


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if not x.is_floating_point() or x.dtype == torch.float64 or dim not in (-1, x.dim() - 1, (-1,), [-1]):
        return torch.sum(x, dim, keepdim, dtype=dtype)
    total = row_sum(x).to(dtype or x.dtype)
    return total[..., None] if keepdim else total


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if dim not in (-1, x.dim() - 1, (-1,), [-1]):
        return torch.mean(x, dim, keepdim, dtype=dtype)  # Refused later.
    mean = (row_sum(x) / x.shape[-1]).to(dtype or x.dtype)
    return mean[..., None] if keepdim else mean


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1:
        return F.layer_norm(x, list(normalized_shape), weight, bias, eps)  # Refused later.
    centred = x.float() - _mean(x.float(), -1, keepdim=True)
    out = centred * torch.rsqrt(_mean(centred * centred, -1, keepdim=True) + eps)
    out = out if weight is None else out * weight.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _softmax(x: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return softmax(x, dim, dtype=dtype)


def _require_last(x: Tensor, dim: int, name: str) -> None:
    if dim not in (-1, x.dim() - 1):
        raise SpecError(
            "model.batch_invariant", f"{name} over another than the last dimension has no such form", "false"
        )


_FORMS: Mapping[str, Callable[..., Any]] = {
    "cos": _by_float64(torch.cos),
    "embedding": _embedding,
    "exp": exp,
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "sin": _by_float64(torch.sin),
    "tanh": tanh,
    "linear": linear,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "bmm": _matmul,
    "mm": _matmul,
    "addmm": _addmm,
    "sum": _sum,
    "mean": _mean,
    "softmax": _softmax,
    "logsumexp": logsumexp,
    "layer_norm": _layer_norm,
}
"""Invariant forms by function name, which torch's functions and tensors' methods share."""


@dataclass
class InvariantPromptState(PromptState):
    """A prefill step."""

    def attend_heads(self, call: AttentionCall) -> Tensor:
        """Returns [1, T, H, D]."""
        _write(call, self.slots_T)
        mask = mask_for(self.masks, call.sliding_window)
        b, q, heads = mask.shape[0], mask.shape[2], _heads(call)
        size = call.cache.shape[3]
        blocks_bn = self._blocks(b, size)
        keys_bnKBD, values_bnKBD = (
            call.cache[i].index_select(0, blocks_bn.flatten()).unflatten(0, blocks_bn.shape) for i in (0, 1)
        )
        seen_bnqB = F.pad(mask[:, 0], (0, -q % size)).unflatten(2, (-1, size)).transpose(1, 2)
        query_bKGqD = call.q_THD.unflatten(0, (b, q)).unflatten(2, heads).permute(0, 2, 3, 1, 4)
        scores = _scores(query_bKGqD.flatten(2, 3)[:, None], keys_bnKBD, call).unflatten(3, (heads[1], q))
        scores = torch.where(seen_bnqB[:, :, None, None], scores, MASKED)
        top_bKGq = _with_sinks(scores.amax(-1).amax(1), call)
        weights = exp(scores - top_bKGq[:, None, ..., None]).flatten(3, 4)
        parts_bnKMX = _parts(weights, values_bnKBD)
        sums = parts_bnKMX.flatten(2).sum(1).view(b, *heads, q, -1)
        out_bKGqD = _divided(sums, top_bKGq, call)
        return out_bKGqD.permute(0, 3, 1, 2, 4).reshape(1, b * q, *call.q_THD.shape[1:])

    def _blocks(self, b: int, block_size: int) -> Tensor:
        """Returns the ids of the blocks, [b, n]: of cached context, then those that the new tokens were written to."""
        own_bn = self.slots_T.unflatten(0, (b, -1))[:, ::block_size] // block_size
        return own_bn if self.ctx_blocks_bc is None else torch.cat([self.ctx_blocks_bc, own_bn], dim=1)


@dataclass
class InvariantDecodeState(DecodeState):
    """A decode step. `rows_bn` is True where block n belongs to row b."""

    rows_bn: Tensor

    def attend_heads(self, call: AttentionCall) -> Tensor:
        """Returns [1, b, H, D]."""
        _write(call, self.slots_b)
        seen_nB = mask_for(self.masks, call.sliding_window)
        keys_nKBD = call.cache[0].index_select(0, self.block_list_n)
        values_nKBD = call.cache[1].index_select(0, self.block_list_n)
        query_nKGD = call.q_THD.index_select(0, self.block_rows_n).unflatten(1, _heads(call))
        scores = torch.where(seen_nB[:, None, None, :], _scores(query_nKGD, keys_nKBD, call), MASKED)
        top_bKG = _with_sinks(self._row_max(scores.amax(-1)), call)
        weights = exp(scores - top_bKG.index_select(0, self.block_rows_n)[..., None])
        parts_nKGX = _parts(weights, values_nKBD)
        mine = self.rows_bn[:, :, None]
        sums = torch.where(mine, parts_nKGX.flatten(1)[None], 0.0).sum(1).view(*top_bKG.shape, -1)
        return _divided(sums, top_bKG, call).reshape(call.q_THD.shape)[None]

    def _row_max(self, x_nKG: Tensor) -> Tensor:
        """Returns the largest of each row's blocks, [b, K, G]."""
        mine = self.rows_bn[:, :, None, None]
        return torch.where(mine, x_nKG[None], MASKED).amax(1)


class InvariantMixer(UniformMixer):
    """Attention over keys and values, in the batch-invariant form."""

    def prompt_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> PagedState:
        """Returns the state of a prompt step."""
        return InvariantPromptState(caches, inputs["slots"], inputs.get("ctx_blocks"), masks)

    def decode_state(
        self, caches: Mapping[str, Tensor], inputs: Mapping[str, Tensor], masks: Masks
    ) -> PagedState:
        """Returns the state of a decode step."""
        blocks = inputs["slots"], inputs["block_list"], inputs["block_rows"]
        return InvariantDecodeState(caches, *blocks, masks, inputs["row_blocks"])


def _write(call: AttentionCall, slots: Tensor) -> None:
    dtype = call.cache.dtype
    write_cache(call.cache, slots, call.k_TKD.to(dtype), call.v_TKD.to(dtype))


def _heads(call: AttentionCall) -> tuple[int, int]:
    """KV heads, and query heads of each."""
    kv_heads = call.k_TKD.shape[1]
    return kv_heads, call.q_THD.shape[1] // kv_heads


def _scores(query: Tensor, keys: Tensor, call: AttentionCall) -> Tensor:
    return softcapped(dot(query, keys) * call.scaling, call.softcap)


def _with_sinks(top: Tensor, call: AttentionCall) -> Tensor:
    return top if call.sinks_H is None else torch.maximum(top, _sinks(call, top))


def _parts(weights: Tensor, values: Tensor) -> Tensor:
    """Returns what each block adds: [..., D] of the output and one number of the total."""
    return torch.cat([weighted(weights, values), row_sum(weights)[..., None]], dim=-1)


def _divided(sums_X: Tensor, top: Tensor, call: AttentionCall) -> Tensor:
    total = sums_X[..., -1]
    if call.sinks_H is not None:
        total = total + exp(_sinks(call, top) - top)
    return sums_X[..., :-1] / total.clamp_min(1e-30)[..., None]


def _sinks(call: AttentionCall, top: Tensor) -> Tensor:
    """The sinks of heads in the shape of `top`: [b, K, G] or [b, K, G, q]."""
    assert call.sinks_H is not None
    return call.sinks_H.float().view(1, *_heads(call), *[1] * (top.dim() - 3))
