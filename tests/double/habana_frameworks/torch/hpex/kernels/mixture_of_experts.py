"""D-32: a mixture of experts as one operator, with the experts ``experts_min`` to ``experts_max`` of all.

The weights of an expert are those of its gate and up projections, apart (``w1``, ``w2``) or one after the other (``w12``),
and those of its down projection (``w3``); permuted ones are as those of ``nn.Linear``. With biases the activation is
gpt-oss's, whose gate and up values alternate. ``chunk_size`` and ``total_experts`` change the speed alone.

Source: ``eager_custom_op_register.cpp`` and the operator's eager form of the bridge (semantics); its schema at 1.24 as
printed in public reports; vllm-gaudi 0.26.0, ``extension/ops.py`` 676-759 (the range of experts). Its variants for FP8
and MXFP4 are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

_LIBRARY = torch.library.Library("hpu", "FRAGMENT")
_ROUTED = "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights"
_HOW = "bool permuted_weights, str activation, int experts_min, int experts_max, *, bool? recomp=True"
_CHUNKS = "int chunk_size=0, int total_experts=0"
_SCHEMAS = {
    "": f"Tensor[] w1, Tensor[] w2, Tensor[] w3, {_HOW}, {_CHUNKS}",
    ".fused_weights": f"Tensor[] w12, Tensor[] w3, {_HOW}, {_CHUNKS}",
    ".bias_fused_weights": (
        "Tensor[] w12, Tensor[] w3, Tensor[] w12_bias, Tensor[] w3_bias, *, bool permuted_weights, int experts_min,"
        f" int experts_max, {_CHUNKS}, float alpha=1.702, float limit=7.0"
    ),
}
_ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu}

_Tensors = Sequence[torch.Tensor]


def _split(hidden, table, weights, w1, w2, w3, permuted_weights, activation, experts_min, experts_max, **_):  # type: ignore[no-untyped-def]
    _require(w3, experts_min, experts_max)

    def expert(number: int) -> torch.Tensor:
        gate, up = (_projected(hidden, one[number], permuted_weights) for one in (w1, w2))
        return _projected(_ACTIVATIONS[activation](gate) * up, w3[number], permuted_weights)

    return _mixed(hidden, table, weights, experts_min, [expert(number) for number in range(len(w3))])


def _fused(hidden, table, weights, w12, w3, permuted_weights, *how, **rest):  # type: ignore[no-untyped-def]
    halves = [one.chunk(2, dim=0 if permuted_weights else 1) for one in w12]
    w1, w2 = ([half[number] for half in halves] for number in (0, 1))
    return _split(hidden, table, weights, w1, w2, w3, permuted_weights, *how, **rest)


def _biased(hidden, table, weights, w12, w3, w12_bias, w3_bias, **how: Any):  # type: ignore[no-untyped-def]
    _require(w3, how["experts_min"], how["experts_max"])
    permuted, alpha, limit = how["permuted_weights"], how.get("alpha", 1.702), how.get("limit", 7.0)

    def expert(number: int) -> torch.Tensor:
        both = _projected(hidden, w12[number], permuted) + w12_bias[number]
        gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
        return (
            _projected((up + 1) * gate * torch.sigmoid(gate * alpha), w3[number], permuted) + w3_bias[number]
        )

    return _mixed(hidden, table, weights, how["experts_min"], [expert(number) for number in range(len(w3))])


def _require(w3: _Tensors, experts_min: int, experts_max: int) -> None:
    if len(w3) != experts_max - experts_min + 1:
        raise RuntimeError(f"{len(w3)} experts are given for {experts_min} to {experts_max}")


def _projected(rows: torch.Tensor, weight: torch.Tensor, permuted: bool) -> torch.Tensor:
    return torch.matmul(rows, weight.t() if permuted else weight)


def _mixed(hidden, table, weights, experts_min, answers):  # type: ignore[no-untyped-def]
    """Sums what a row's experts answer, by their weights. Experts of other ranks add nothing."""
    found = torch.zeros_like(hidden)
    for number, answer in enumerate(answers, experts_min):
        found += answer * (weights * (table == number)).sum(-1, keepdim=True).to(hidden.dtype)
    return found


def _fake(hidden, *rest, **how):  # type: ignore[no-untyped-def]
    del rest, how
    return torch.empty_like(hidden)


for (_overload, _rest), _function in zip(_SCHEMAS.items(), (_split, _fused, _biased), strict=True):
    _LIBRARY.define(f"mixture_of_experts{_overload}({_ROUTED}, {_rest}) -> Tensor")
    _LIBRARY.impl(f"mixture_of_experts{_overload}", _function, "CPU")
    _LIBRARY.impl(f"mixture_of_experts{_overload}", _fake, "Meta")
