"""Checks and probes of compiled graphs: operators, writes in place, and the accuracy of larger parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aotgaudi.doctor.hpu.bridge import MAX_ERROR, Bridge, Run, attempted, difference, refusal
from aotgaudi.doctor.hpu.lab import HpuCheck, LineFinding, judged, probe, skipped
from aotgaudi.doctor.hpu.recipes import NUMBERS

CHECKS: list[HpuCheck] = []

_MIB = 1 << 20
_CACHE_ROWS, _WIDTH = 1 << 18, 64
_VOCABULARIES = (32_000, 128_256)
_DECODE_SIZES = ((1, 8), (4, 32), (16, 128))
"""The numbers of sequences, and of the blocks that they have in all."""
_ATTENTIONS = ((1, 16, 64), (4, 128, 128), (8, 64, 128))
"""The numbers of queries per key and of tokens, and the size of a head."""

_Operator = tuple[Run, tuple[Any, ...]]


def _judged_worst(line: str, errors: Mapping[str, float], more: str = "") -> LineFinding:
    name, error = max(errors.items(), key=lambda row: row[1])
    return judged(line, error <= MAX_ERROR, f"{error:.1e} off at most ({name}){more}")


@probe(CHECKS, "H-12", "what is not lowered", "K-18", "K-34", needs=NUMBERS)
def fallbacks(bridge: Bridge) -> Iterator[LineFinding]:
    """Compiles something that cannot be lowered, and views as outputs, without eager fallback."""
    torch = bridge.torch
    x = torch.randn(4, 8)

    def attempt(function: Run) -> str:
        bridge.forget()
        return refusal(lambda: bridge.compiled(function)(*bridge.placed(x)))

    view, copy = attempt(lambda a: (a + 1).view(8, 4)), attempt(lambda a: (a + 1).view(8, 4).clone())
    before = bridge.counts()
    not_lowered = attempt(lambda a: torch.addcmul(a, a, a))
    outside = bridge.counts().since(before)
    if not_lowered:
        yield judged("K-18", True, "an error")
    elif outside.fallbacks + outside.eager_compiled:
        yield judged("K-18", False, "it fell back without a word")
        yield from skipped(("K-34",), "K-18 was refuted")
        return
    else:
        yield from skipped(("K-18",), "this release lowers addcmul, by which it would be seen")
    yield judged(
        "K-34", bool(view) and not copy, "a view is an error, its copy is not", copy or "a view is taken"
    )


@probe(CHECKS, "H-13", "the operators of our graphs", "K-19", "K-44", needs=NUMBERS)
def operators(bridge: Bridge) -> Iterator[LineFinding]:
    """Compiles the operators of our graphs as one graph; if that fails, each separately, to find the culprit."""
    table, bad = _operator_table(bridge.torch), list[str]()
    if _is_bad(bridge, list(table.values())):
        bad = [name for name, row in table.items() if _is_bad(bridge, [row])] or ["all of them in one graph"]
    yield judged("K-19", not bad, f"all {len(table)}", f"not {', '.join(bad)}")
    rows, indices = bridge.random()[0], bridge.torch.tensor([-1, 0])
    got, problem = attempted(
        lambda: bridge.compiled(lambda a, i: a.index_select(0, i) * 1.0)(*bridge.placed(rows, indices)).cpu()
    )
    error = math.inf if problem else difference(got, rows[[3, 0]])
    yield judged("K-44", error <= MAX_ERROR, problem or f"{error:.1e} off the last row")


def _is_bad(bridge: Bridge, rows: Sequence[_Operator]) -> bool:
    """Whether a graph of operators is refused, falls back to the CPU, or differs from it."""

    def run(*args: Any) -> Any:
        rest = iter(args)
        return tuple(function(*(next(rest) for _ in inputs)) for function, inputs in rows)

    bridge.forget()
    before = bridge.counts()
    inputs = [tensor for _, inputs in rows for tensor in inputs]
    found, problem = attempted(lambda: bridge.compiled(run)(*bridge.placed(*inputs)))
    if problem or bridge.counts().since(before).fallbacks:
        return True
    wanted = (function(*inputs) for function, inputs in rows)
    return any(difference(*pair) > MAX_ERROR for pair in zip(found, wanted, strict=True))


def _operator_table(torch: Any) -> Mapping[str, tuple[Run, tuple[Any, ...]]]:
    """Returns the operators of our graphs, each with inputs. None ends in a view, which is the subject of K-34."""
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


@probe(CHECKS, "H-16", "writing to the KV cache", "K-21", needs=(*NUMBERS, "K-19"))
def in_place(bridge: Bridge) -> Iterator[LineFinding]:
    """Writes two rows of a large cache, and looks how much memory this takes in addition to the cache."""
    torch = bridge.torch

    def write(cache: Any, rows: Any, slots: Any) -> Any:
        cache.index_copy_(0, slots, rows)
        return rows * 1.0

    cache, rows, slots = bridge.placed(
        torch.zeros(_CACHE_ROWS, _WIDTH), torch.ones(2, _WIDTH), torch.tensor([1, _CACHE_ROWS - 1])
    )
    run = bridge.compiled(write)
    in_use = torch.hpu.memory_stats()["InUse"]
    for _ in range(2):
        run(cache, rows, slots)
    torch.hpu.synchronize()
    rise, size = (torch.hpu.memory_stats()["MaxInUse"] - in_use) / _MIB, _CACHE_ROWS * _WIDTH * 4 / _MIB
    is_written = float(cache.cpu()[_CACHE_ROWS - 1, 0]) == 1.0
    yield judged(
        "K-21", is_written and rise < size / 2, f"writing to {size:.0f} MiB took {rise:.0f} MiB more"
    )


@probe(CHECKS, "H-17", "fused attention", "K-24", "K-43", needs=NUMBERS)
def attention(bridge: Bridge) -> Iterator[LineFinding]:
    """Runs fused attention in the forms that prompts need, and looks at the rows beyond the lengths, too."""
    torch = bridge.torch
    bridge.module("hpex.kernels.FusedSDPA")
    operator = torch.ops.hpu.sdpa_recomp_fwd
    schema, errors, beyond = f"; {operator.default._schema}", dict[str, float](), list[str]()
    for group, length, size in _ATTENTIONS:
        q = torch.randn(1, 2, group, length, size)
        k, v = torch.randn(2, 1, 2, 1, length, size)
        lengths, scale = torch.tensor([length - 3], dtype=torch.int32), size**-0.5
        mask = torch.ones(length, length).tril().log()
        wanted = (torch.softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v)[..., : length - 3, :]

        def run(a: Any, b: Any, c: Any, n: Any, scale: float = scale) -> Any:
            return operator(a, b, c, None, 0.0, scale, True, False, "fast", n, "right")[0] * 1.0

        bridge.forget()
        inputs = q, k, v, lengths
        got, problem = attempted(
            lambda run, inputs: bridge.compiled(run)(*bridge.placed(*inputs)).cpu(), run, inputs
        )
        if problem:  # Another schema, for example.
            yield judged("K-24", False, f"{problem}{schema}")
            yield from skipped(("K-43",), "K-24 was refuted")
            return
        name = f"group {group}, {length} x {size}"
        errors[name] = difference(got[..., : length - 3, :], wanted)
        if not bool(got.isfinite().all()):
            beyond.append(name)
    yield _judged_worst("K-24", errors, schema)
    yield judged("K-43", not beyond, "they are", f"not so in {', '.join(beyond)}")


@probe(CHECKS, "H-24", "the sampler", "K-39", needs=(*NUMBERS, "K-19"))
def sampler(bridge: Bridge) -> Iterator[LineFinding]:
    """Sorts, adds up and picks over vocabularies."""
    torch = bridge.torch

    def run(a: Any) -> tuple[Any, ...]:
        weights = torch.softmax(a, -1)
        highest = torch.sort(a, -1, descending=True).values * 1.0
        return highest, weights, weights.cumsum(-1), a.argmax(-1), torch.logsumexp(a, -1) * 1.0

    names, errors = ("sort", "softmax", "cumsum", "argmax", "logsumexp"), {}
    for logits in bridge.random([(4, size) for size in _VOCABULARIES]):
        bridge.forget()
        found = bridge.compiled(run)(*bridge.placed(logits))
        for name, got, wanted in zip(names, found, run(logits), strict=True):
            errors[f"{name} of {logits.shape[1]}"] = difference(got, wanted)
    yield _judged_worst("K-39", errors)


@probe(CHECKS, "H-25", "decode attention", "K-40", needs=(*NUMBERS, "K-19"))
def flat_decode(bridge: Bridge) -> Iterator[LineFinding]:
    """Attends over flat lists of blocks, with four queries per key."""
    torch, errors = bridge.torch, {}
    heads, group, size, block = 2, 4, 64, 16

    def run(q: Any, k: Any, v: Any, r: Any) -> Any:
        mine = (r.transpose(0, 1) @ q.flatten(1)).unflatten(1, (heads, group, size))
        scores = (mine @ k.transpose(2, 3)) * size**-0.5
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).amax(0, keepdim=True))
        parts, totals = (weights @ v).flatten(1), weights.sum(-1).flatten(1)
        return ((r @ parts).unflatten(1, (heads * group, size)) / (r @ totals)[..., None]) * 1.0

    for batch, num_blocks in _DECODE_SIZES:
        bridge.forget()
        keys, values = torch.randn(2, num_blocks, heads, block, size)
        rows = (torch.arange(batch)[:, None] == torch.arange(num_blocks)[None] % batch).float()
        inputs = torch.randn(batch, heads, group, size), keys, values, rows
        got = bridge.compiled(run)(*bridge.placed(*inputs))
        errors[f"{batch} sequences, {num_blocks} blocks"] = difference(got, run(*inputs))
    yield _judged_worst("K-40", errors)


@probe(CHECKS, "H-27", "static and dynamic traces", "K-45", needs=(*NUMBERS, "K-12"))
def traces(bridge: Bridge) -> Iterator[LineFinding]:
    """Runs one function with a shape, two others, and the first again, and compares the keys of its first and last run."""
    run = bridge.compiled(lambda a, b: (a @ b).reshape(a.shape[0] * 2, 4) * 2.0 + 1.0, False)
    keys = []
    for num_rows in (8, 12, 16, 8):
        before = bridge.counts()
        run(*bridge.placed(*bridge.random(((num_rows, 8), (8, 8)))))
        keys.append(sorted(bridge.counts().since(before).recipes))
    before_others, after = (", ".join(found) or "none" for found in (keys[0], keys[-1]))
    yield judged("K-45", keys[0] != keys[-1], f"{after} after {before_others}")
