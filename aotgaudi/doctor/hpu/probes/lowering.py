"""Probes of what the backend makes of graphs: which operators it lowers, which options it takes, what it does in place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aotgaudi.doctor.hpu.probes.bridge import Bridge, Run, difference, one_line, refusal
from aotgaudi.doctor.hpu.probes.recipes import SHAPES, graph

_NUM_CALLS = 100


def options(values: Mapping[str, object]) -> Mapping[str, Any]:
    """Compiles with each option; says which were refused, and why."""
    bridge = Bridge()
    inputs = bridge.placed(*bridge.random(SHAPES))
    refused = {}
    for name, value in values.items():
        bridge.forget()
        run = bridge.compiled(graph(2), **{name: value})
        problem = refusal(lambda run=run: run(*inputs))  # type: ignore[misc]
        if problem:
            refused[name] = problem
    return {"refused": refused}


def fallbacks() -> Mapping[str, Any]:
    """Compiles what cannot be lowered, and views as outputs, without eager fallback; says what was refused, and why.

    And how many operators ran outside the graph of what cannot be lowered: 0, too, where this release does lower it.
    """
    bridge = Bridge()
    torch = bridge.torch
    x = torch.randn(4, 8)

    def attempt(function: Run) -> str:
        bridge.forget()
        return refusal(lambda: bridge.compiled(function)(*bridge.placed(x)))

    views = {
        "view": attempt(lambda a: (a + 1).view(8, 4)),
        "copy_of_view": attempt(lambda a: (a + 1).view(8, 4).clone()),
    }
    before = bridge.counts()
    refused = attempt(lambda a: torch.addcmul(a, a, a))
    outside = bridge.counts().since(before)
    return {**views, "not_lowered": refused, "num_outside": outside.fallbacks + outside.eager_compiled}


def operators() -> Mapping[str, Any]:
    """Compiles the operators of our graphs; says which are refused, fall back to the CPU, or differ from it.

    All are one graph; only where that fails, each is one of its own, so that it is known which it was.
    """
    bridge = Bridge()
    table = _operators(bridge.torch)
    together = _of_all(bridge, table)
    return together if together is not None else _of_each(bridge, table)


def _of_all(bridge: Bridge, table: Mapping[str, tuple[Run, tuple[Any, ...]]]) -> Mapping[str, Any] | None:
    rows = list(table.values())
    flat = [tensor for _, inputs in rows for tensor in inputs]

    def run(*args: Any) -> Any:
        rest = iter(args)
        return tuple(function(*(next(rest) for _ in inputs)) for function, inputs in rows)

    before = bridge.counts()
    try:
        found = bridge.compiled(run)(*bridge.placed(*flat))
    except Exception:  # Which operator it was is found out one by one.
        return None
    if bridge.counts().since(before).fallbacks:
        return None
    errors = {
        name: difference(got, function(*inputs))
        for (name, (function, inputs)), got in zip(table.items(), found, strict=True)
    }
    return {"failed": {}, "fell_back": [], "errors": errors}


def _of_each(bridge: Bridge, table: Mapping[str, tuple[Run, tuple[Any, ...]]]) -> Mapping[str, Any]:
    failed, fell_back, errors = {}, [], {}
    for name, (function, inputs) in table.items():
        bridge.forget()
        before = bridge.counts()
        try:
            errors[name] = difference(bridge.compiled(function)(*bridge.placed(*inputs)), function(*inputs))
        except Exception as error:
            failed[name] = one_line(error)
        if bridge.counts().since(before).fallbacks:
            fell_back.append(name)
    return {"failed": failed, "fell_back": fell_back, "errors": errors}


def _operators(torch: Any) -> Mapping[str, tuple[Run, tuple[Any, ...]]]:
    """The operators of our graphs, each with inputs. None ends in a view, which K-34 is about."""
    x, square, ids = torch.randn(4, 8), torch.randn(8, 8), torch.tensor([2, 0, 1])
    cube, positive = torch.randn(2, 4, 8), torch.rand(4, 8) + 0.5
    names = ("exp", "neg", "rsqrt", "cos", "sin", "sigmoid", "tanh")
    return {
        **{name: (getattr(torch, name), (positive,)) for name in names},
        "silu": (torch.nn.functional.silu, (x,)),
        "gelu": (torch.nn.functional.gelu, (x,)),
        "linear": (torch.nn.functional.linear, (x, square)),
        "matmul": (lambda a, b: torch.matmul(a, b) * 1.0, (cube, torch.randn(2, 8, 4))),
        "arithmetic": (lambda a, b: (a + b) * a - b / a.abs().clamp_min(1.0), (x, torch.randn(4, 8))),
        "pow_mean": (lambda a: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-5), (x,)),
        "sum_amax": (lambda a: a.sum(-1) + a.amax(-1), (x,)),
        "softmax": (lambda a: torch.softmax(a, -1), (x,)),
        "where": (lambda a: torch.where(a > 0, a, -1.0), (x,)),
        "cat": (lambda a, b: torch.cat([a, b], 1), (x, torch.randn(4, 3))),
        "slices": (lambda a: a[:, 2:6].transpose(0, 1).unsqueeze(0) * 2.0, (x,)),
        "reshape": (lambda a: a.unflatten(1, (2, 4)).flatten(0, 1) + 1.0, (x,)),
        "index_select": (lambda a, i: a.index_select(0, i) * 1.0, (x, ids)),
        "embedding": (lambda a, i: torch.nn.functional.embedding(i, a) * 1.0, (x, ids)),
        "index_copy": (lambda a, i, b: a.index_copy(0, i, b) * 1.0, (x, ids, torch.randn(3, 8))),
        "gather": (lambda a, i: a.gather(1, i) * 1.0, (x, torch.zeros(4, 1, dtype=torch.int64))),
        "cumsum": (lambda a: a.cumsum(-1), (x,)),
        "sort": (lambda a: a.sort(-1, descending=True).values * 1.0, (x,)),
        "argmax": (lambda a: a.argmax(-1), (x,)),
        "topk": (lambda a: torch.topk(a, 3).values * 1.0, (x,)),
        "logsumexp": (lambda a: torch.logsumexp(a, -1) * 1.0, (x,)),
        "to_bfloat16": (lambda a: (a.to(torch.bfloat16) * 2.0).to(torch.float32), (x,)),
        "compare_integers": (lambda i: (i < 2).to(torch.float32) + i.to(torch.float32), (ids,)),
    }


def in_place(num_rows: int) -> Mapping[str, Any]:
    """Writes two rows of a large cache; says how much memory that took beyond the cache."""
    bridge = Bridge()
    torch = bridge.torch

    def write(cache: Any, rows: Any, slots: Any) -> Any:
        cache.index_copy_(0, slots, rows)
        return rows * 1.0

    cache, rows, slots = bridge.placed(
        torch.zeros(num_rows, 64), torch.ones(2, 64), torch.tensor([1, num_rows - 1])
    )
    run = bridge.compiled(write)
    in_use = torch.hpu.memory_stats()["InUse"]
    for _ in range(2):
        run(cache, rows, slots)
    torch.hpu.synchronize()
    return {
        "cache_bytes": num_rows * 64 * 4,
        "rise_bytes": torch.hpu.memory_stats()["MaxInUse"] - in_use,
        "is_written": float(cache.cpu()[num_rows - 1, 0]) == 1.0,
    }


def front_ends() -> Mapping[str, Any]:
    """Compiles a graph by both front ends; says what a call costs, how far the direct one is from the CPU, and its keys."""
    bridge = Bridge()
    inputs = bridge.random(SHAPES)
    placed = bridge.placed(*inputs)
    keys: list[frozenset[str]] = []

    def microseconds(run: Run) -> int:
        before = bridge.counts()
        run(*placed)
        keys.append(bridge.counts().since(before).recipes)
        began = time.perf_counter()
        for _ in range(_NUM_CALLS):
            run(*placed)
        bridge.torch.hpu.synchronize()
        return round((time.perf_counter() - began) / _NUM_CALLS * 1e6)

    values = {"dynamo_microseconds": microseconds(bridge.compiled(graph(5))), "problem": ""}
    try:
        direct = bridge.compiled_directly(graph(5), inputs, placed)
        values |= {
            "direct_microseconds": microseconds(direct),
            "direct_error": difference(direct(*placed), graph(5)(*inputs)),
        }
    except Exception as error:  # Whatever the bridge raises is what is looked for.
        return {**values, "problem": one_line(error)}
    return {**values, "has_same_keys": keys[0] == keys[1]}
