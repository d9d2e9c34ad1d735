"""Probes of numbers: attention and the sampler on the device, compared with the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotgaudi.doctor.hpu.probes.bridge import Bridge, difference, one_line

_ATTENTIONS = ((1, 16, 64), (4, 128, 128), (8, 64, 128))
"""Queries a key, tokens, size of a head."""


def attention() -> Mapping[str, Any]:
    """Runs fused attention in the forms that prompts need; says how far each is from the CPU's, or why it was refused."""
    bridge = Bridge()
    torch = bridge.torch
    bridge.module("hpex.kernels.FusedSDPA")
    operator = torch.ops.hpu.sdpa_recomp_fwd
    schema, errors, problem = str(operator.default._schema), {}, ""
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
        except Exception as error:  # Of another schema, say, which is told.
            problem = one_line(error)
            break
        errors[f"group {group}, {length} x {size}"] = difference(got.cpu()[..., : length - 3, :], wanted)
    return {"errors": errors, "problem": problem, "schema": schema}


def sampler(vocab_sizes: Sequence[int]) -> Mapping[str, Any]:
    """Sorts, adds up and picks over vocabularies; says how far each is from the CPU's."""
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


def flat_decode(sizes: Sequence[tuple[int, int]]) -> Mapping[str, Any]:
    """Attends over flat lists of blocks, four queries a key; says how far each is from the CPU's.

    `sizes` are numbers of sequences, and of the blocks that they have in all.
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
