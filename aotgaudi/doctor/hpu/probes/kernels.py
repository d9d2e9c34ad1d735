"""Probes of numbers: attention and the sampler on the device, compared with the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotgaudi.doctor.hpu.probes.bridge import Bridge, difference


def attention() -> Mapping[str, Any]:
    """Runs fused attention in the forms that prompts need; says how far each is from the CPU's."""
    bridge = Bridge()
    torch = bridge.torch
    bridge.module("hpex.kernels.FusedSDPA")
    operator = torch.ops.hpu.sdpa_recomp_fwd
    errors = {}
    for group, length, size in ((1, 16, 64), (4, 128, 128)):
        q = torch.randn(1, 2, group, length, size)
        k, v = torch.randn(2, 1, 2, 1, length, size)
        lengths, scale = torch.tensor([length - 3], dtype=torch.int32), size**-0.5
        mask = torch.ones(length, length).tril().log()
        wanted = (torch.softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v)[..., : length - 3, :]

        def run(a: Any, b: Any, c: Any, n: Any, scale: float = scale) -> Any:
            return operator(a, b, c, None, 0.0, scale, True, False, "fast", n, "right")[0] * 1.0

        bridge.forget()
        got = bridge.compiled(run)(*bridge.placed(q, k, v, lengths))
        errors[f"group {group}, {length} x {size}"] = difference(got.cpu()[..., : length - 3, :], wanted)
    return {"errors": errors}


def sampler(vocab_size: int) -> Mapping[str, Any]:
    """Sorts, adds up and picks over a vocabulary; says how far each is from the CPU's."""
    bridge = Bridge()
    torch = bridge.torch
    (logits,) = bridge.random([(4, vocab_size)])

    def run(a: Any) -> tuple[Any, ...]:
        weights = torch.softmax(a, -1)
        highest = torch.sort(a, -1, descending=True).values * 1.0
        return highest, weights, weights.cumsum(-1), a.argmax(-1), torch.logsumexp(a, -1) * 1.0

    found = bridge.compiled(run)(*bridge.placed(logits))
    names = ("sort", "softmax", "cumsum", "argmax", "logsumexp")
    rows = zip(names, found, run(logits), strict=True)
    return {"errors": {name: difference(got, wanted) for name, got, wanted in rows}}


def flat_decode(batch: int, num_blocks: int) -> Mapping[str, Any]:
    """Attends over a flat list of blocks, four queries a key; says how far that is from the CPU's."""
    bridge = Bridge()
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
    return {"errors": {f"{batch} sequences": difference(got, run(query, keys, values, rows))}}
