"""Checks and probes of compiled graphs: operators, writes in place, front ends, and the accuracy of larger parts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aotgaudi.doctor.hpu.bridge import SHAPES, Bridge, Run, difference, graph, one_line, refusal
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, judged, skipped
from aotgaudi.doctor.hpu.recipes import MAX_ERROR, NUMBERS

_MIB = 1 << 20
_CACHE_ROWS = 1 << 18
_VOCABULARIES = (32_000, 128_256)
_DECODE_SIZES = ((1, 8), (4, 32), (16, 128))
"""The numbers of sequences, and of the blocks that they have in all."""


def _fallbacks(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.fallbacks").required()
    if not values["not_lowered"] and not values["num_outside"]:
        yield from skipped(("K-18",), "this release lowers addcmul, by which it would be seen")
    else:
        yield judged("K-18", bool(values["not_lowered"]), "an error", "it fell back without a word")
        if not values["not_lowered"]:
            yield from skipped(("K-34",), "K-18 was refuted")
            return
    holds = bool(values["view"]) and not values["copy_of_view"]
    lacks = values["copy_of_view"] or "a view is taken"
    yield judged("K-34", holds, "a view is an error, its copy is not", lacks)


def _operators(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.operators").required()
    wrong = [name for name, error in values["errors"].items() if error > MAX_ERROR]
    bad = sorted({*values["failed"], *values["fell_back"], *wrong})
    yield judged("K-19", not bad, f"all {len(values['errors'])}", f"not {', '.join(bad)}")
    rows = lab.run("lowering.negative_index").required()
    seen = rows["problem"] or f"{rows['error']:.1e} off the last row"
    yield judged("K-44", not rows["problem"] and rows["error"] <= MAX_ERROR, seen)


def _in_place(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.in_place", num_rows=_CACHE_ROWS).required()
    rise, cache = values["rise_bytes"] / _MIB, values["cache_bytes"] / _MIB
    seen = f"writing to {cache:.0f} MiB took {rise:.0f} MiB more"
    yield judged("K-21", values["is_written"] and rise < cache / 2, seen)


def _front_ends(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.front_ends").required()
    if values["problem"]:
        yield judged("K-06", False, values["problem"])
        return
    error, keys = values["direct_error"], "the same keys" if values["has_same_keys"] else "other keys"
    seen = (
        f"{error:.1e} off, {keys}; a call takes {values['direct_microseconds']} us,"
        f" through Dynamo {values['dynamo_microseconds']} us"
    )
    yield judged("K-06", error <= MAX_ERROR, seen)


def _attention(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.attention").required()
    schema = f"; {values['schema']}"
    if values["problem"]:
        yield judged("K-24", False, f"{values['problem']}{schema}")
        yield from skipped(("K-43",), "K-24 was refuted")
        return
    name, error = _worst(values)
    yield judged("K-24", error <= MAX_ERROR, f"{error:.1e} off at most ({name}){schema}")
    beyond = values["beyond"]
    yield judged("K-43", not beyond, "they are", f"not so in {', '.join(beyond)}")


def _traces(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.traces").required()
    before, after = (", ".join(keys) or "none" for keys in (values["before"], values["after"]))
    yield judged("K-45", values["before"] != values["after"], f"{after} after {before}")


def _sampler(lab: Lab) -> Iterator[LineFinding]:
    name, error = _worst(lab.run("lowering.sampler", vocab_sizes=_VOCABULARIES).required())
    yield judged("K-39", error <= MAX_ERROR, f"{error:.1e} off at most ({name})")


def _flat_decode(lab: Lab) -> Iterator[LineFinding]:
    name, error = _worst(lab.run("lowering.flat_decode", sizes=_DECODE_SIZES).required())
    yield judged("K-40", error <= MAX_ERROR, f"{error:.1e} off at most ({name})")


def _worst(values: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the name and the size of the largest error."""
    errors: Mapping[str, float] = values["errors"]
    return max(errors.items(), key=lambda row: row[1])


CHECKS = (
    HpuCheck("H-12", "what is not lowered", ("K-18", "K-34"), _fallbacks, NUMBERS),
    HpuCheck("H-13", "the operators of our graphs", ("K-19", "K-44"), _operators, NUMBERS),
    HpuCheck("H-16", "writing to the KV cache", ("K-21",), _in_place, (*NUMBERS, "K-19")),
    HpuCheck("H-17", "fused attention", ("K-24", "K-43"), _attention, NUMBERS),
    HpuCheck("H-18", "front ends", ("K-06",), _front_ends, NUMBERS),
    HpuCheck("H-24", "the sampler", ("K-39",), _sampler, (*NUMBERS, "K-19")),
    HpuCheck("H-25", "decode attention", ("K-40",), _flat_decode, (*NUMBERS, "K-19")),
    HpuCheck("H-27", "static and dynamic traces", ("K-45",), _traces, (*NUMBERS, "K-12")),
)


# Probes


_NUM_CALLS = 100


def probe_options(values: Mapping[str, object]) -> Mapping[str, Any]:
    """Compiles with each option. Returns which were refused, and why."""
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


def probe_fallbacks() -> Mapping[str, Any]:
    """Compiles something that cannot be lowered, and views as outputs, without eager fallback. Returns refusals and reasons.

    Also returns how many operators of the former ran outside the graph, which is 0 as well if this release lowers it.
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


def probe_operators() -> Mapping[str, Any]:
    """Compiles the operators of our graphs. Returns which are refused, fall back to the CPU, or differ from it.

    All are compiled as one graph. If that fails, each is compiled separately to find the culprit.
    """
    bridge = Bridge()
    table = _operator_table(bridge.torch)
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
    except Exception:  # Each operator is then tried by itself.
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


def _operator_table(torch: Any) -> Mapping[str, tuple[Run, tuple[Any, ...]]]:
    """Returns the operators of our graphs, each with inputs. None of them ends in a view, which is the subject of K-34."""
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
        "scatter_add": (
            lambda a, i, b: a.scatter_add(1, i, b),
            (x, torch.zeros(4, 3, dtype=torch.int64), x[:, :3]),
        ),
        "sorted_ids": (lambda a: torch.sort(a, -1, descending=True).indices.to(torch.float32), (x,)),
        "minimum": (torch.minimum, (x, torch.randn(4, 8))),
        "split": (lambda a: a.split([2, 6], 1)[1] * 1.0, (x,)),
        "bits": (
            lambda w, i: (w[:, None] & torch.bitwise_left_shift(i, i)).ne(0).to(torch.float32),
            (torch.tensor([5, -2], dtype=torch.int32), torch.arange(8, dtype=torch.int32)),
        ),
        "compare_integers": (lambda i: (i < 2).to(torch.float32) + i.to(torch.float32), (ids,)),
    }


def probe_negative_index() -> Mapping[str, Any]:
    """Selects rows by -1 and 0. Returns how far the result is from the last row and the first, or why it was refused."""
    bridge = Bridge()
    rows = bridge.random(((4, 8),))[0]
    indices = bridge.torch.tensor([-1, 0])
    try:
        got = bridge.compiled(lambda a, i: a.index_select(0, i) * 1.0)(*bridge.placed(rows, indices))
        return {"error": difference(got, rows[[3, 0]]), "problem": ""}
    except Exception as error:  # Whatever the bridge raises is the answer.
        return {"error": 0.0, "problem": one_line(error)}


def probe_traces() -> Mapping[str, Any]:
    """Runs one function with a shape, two others, and the first again. Returns the keys of its first and last run."""
    bridge = Bridge()
    run = bridge.compiled(lambda a, b: (a @ b).reshape(a.shape[0] * 2, 4) * 2.0 + 1.0, False)
    keys = []
    for num_rows in (8, 12, 16, 8):
        before = bridge.counts()
        run(*bridge.placed(*bridge.random(((num_rows, 8), (8, 8)))))
        counts = bridge.counts().since(before)
        keys.append(sorted({*counts.hits, *counts.misses}))
    return {"before": keys[0], "after": keys[-1]}


def probe_in_place(num_rows: int) -> Mapping[str, Any]:
    """Writes two rows of a large cache. Returns the memory that this took in addition to the cache."""
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


def probe_front_ends() -> Mapping[str, Any]:
    """Compiles a graph by both front ends. Returns the cost of a call, the error of the direct one, and its keys."""
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
    except Exception as error:  # Whatever the bridge raises is the answer.
        return {**values, "problem": one_line(error)}
    return {**values, "has_same_keys": keys[0] == keys[1]}


_ATTENTIONS = ((1, 16, 64), (4, 128, 128), (8, 64, 128))
"""The numbers of queries per key and of tokens, and the size of a head."""


def probe_attention() -> Mapping[str, Any]:
    """Runs fused attention in the forms that prompts need. Returns the error of each against the CPU, or its refusal.

    `beyond` names the forms whose rows beyond the lengths are not all finite.
    """
    bridge = Bridge()
    torch = bridge.torch
    bridge.module("hpex.kernels.FusedSDPA")
    operator = torch.ops.hpu.sdpa_recomp_fwd
    schema, errors, problem = str(operator.default._schema), {}, ""
    beyond: list[str] = []
    for group, length, size in _ATTENTIONS:
        q = torch.randn(1, 2, group, length, size)
        k, v = torch.randn(2, 1, 2, 1, length, size)
        lengths, scale = torch.tensor([length - 3], dtype=torch.int32), size**-0.5
        mask = torch.ones(length, length).tril().log()
        wanted = (torch.softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v)[..., : length - 3, :]

        def run(a: Any, b: Any, c: Any, n: Any, scale: float = scale) -> Any:
            return operator(a, b, c, None, 0.0, scale, True, False, "fast", n, "right")[0] * 1.0

        bridge.forget()
        try:
            got = bridge.compiled(run)(*bridge.placed(q, k, v, lengths))
        except Exception as error:  # Another schema, for example. It is reported.
            problem = one_line(error)
            break
        name, got = f"group {group}, {length} x {size}", got.cpu()
        errors[name] = difference(got[..., : length - 3, :], wanted)
        if not bool(got.isfinite().all()):
            beyond.append(name)
    return {"errors": errors, "problem": problem, "schema": schema, "beyond": beyond}


def probe_sampler(vocab_sizes: Sequence[int]) -> Mapping[str, Any]:
    """Sorts, adds up and picks over vocabularies. Returns the error of each against the CPU."""
    bridge = Bridge()
    torch = bridge.torch

    def run(a: Any) -> tuple[Any, ...]:
        weights = torch.softmax(a, -1)
        highest = torch.sort(a, -1, descending=True).values * 1.0
        return highest, weights, weights.cumsum(-1), a.argmax(-1), torch.logsumexp(a, -1) * 1.0

    names, errors = ("sort", "softmax", "cumsum", "argmax", "logsumexp"), {}
    for vocab_size, logits in zip(
        vocab_sizes, bridge.random([(4, size) for size in vocab_sizes]), strict=True
    ):
        bridge.forget()
        found = bridge.compiled(run)(*bridge.placed(logits))
        for name, got, wanted in zip(names, found, run(logits), strict=True):
            errors[f"{name} of {vocab_size}"] = difference(got, wanted)
    return {"errors": errors}


def probe_flat_decode(sizes: Sequence[tuple[int, int]]) -> Mapping[str, Any]:
    """Attends over flat lists of blocks, with four queries per key. Returns the error of each against the CPU.

    `sizes` are the numbers of sequences, and of the blocks that they have in all.
    """
    bridge = Bridge()
    errors = {}
    for batch, num_blocks in sizes:
        bridge.forget()
        errors[f"{batch} sequences, {num_blocks} blocks"] = _flat_decode_error(bridge, batch, num_blocks)
    return {"errors": errors}


def _flat_decode_error(bridge: Bridge, batch: int, num_blocks: int) -> float:
    torch = bridge.torch
    heads, group, size, block = 2, 4, 64, 16
    keys, values = torch.randn(2, num_blocks, heads, block, size)
    query = torch.randn(batch, heads, group, size)
    rows = (torch.arange(batch)[:, None] == torch.arange(num_blocks)[None] % batch).float()

    def run(q: Any, k: Any, v: Any, r: Any) -> Any:
        mine = (r.transpose(0, 1) @ q.flatten(1)).unflatten(1, (heads, group, size))
        scores = (mine @ k.transpose(2, 3)) * size**-0.5
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).amax(0, keepdim=True))
        parts, totals = (weights @ v).flatten(1), weights.sum(-1).flatten(1)
        return ((r @ parts).unflatten(1, (heads * group, size)) / (r @ totals)[..., None]) * 1.0

    got = bridge.compiled(run)(*bridge.placed(query, keys, values, rows))
    return difference(got, run(query, keys, values, rows))
