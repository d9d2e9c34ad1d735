"""What a process with the double finds of the modules that models import: ``bridge_modules.py`` prints it as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch.nn import functional


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the largest difference. `found` must be of the device."""
    assert found.device.type == "hpu"
    return float((found.cpu() - wanted).abs().max())


def on_hpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to("hpu") for tensor in tensors]


def kernels() -> Iterator[tuple[str, Any]]:
    """D-21 and D-28, alone and compiled."""
    from habana_frameworks.torch.hpex.kernels import FusedSDPA, RotaryPosEmbeddingMode, apply_rotary_pos_emb
    from habana_frameworks.torch.hpex.kernels.FusedSDPA import is_gqa
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    hidden, weight = torch.randn(2, 3, 8), torch.randn(8)
    angles = torch.rand(4, 1, 4)
    cos, sin = (torch.cat((half, half), -1) for half in (angles.cos(), angles.sin()))
    heads = torch.randn(4, 2, 8)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        options = (None, 0.0, True, None, "fast", True, None, "right", False, False, (-1, -1), None)
        found: torch.Tensor = FusedSDPA.apply(*tensors, *options)
        return found

    def norm(data: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = FusedRMSNorm.apply(data, gamma, 1e-5)
        return found

    def rotate(p: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = apply_rotary_pos_emb(p, c, s, None, 0, RotaryPosEmbeddingMode.BLOCKWISE)
        return found

    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    turned = torch.complex(heads[..., :4], heads[..., 4:]) * torch.complex(angles.cos(), angles.sin())
    rotated = torch.cat((turned.real, turned.imag), -1)
    rows = (
        ("attention", attend, (q, k, v), attended),
        ("norm", norm, (hidden, weight), functional.rms_norm(hidden, (8,), weight, 1e-5)),
        ("rotary", rotate, (heads, cos, sin), rotated),
    )
    for name, function, inputs, wanted in rows:
        yield name, far(function(*on_hpu(*inputs)), wanted)
        compiled = torch.compile(function, backend="hpu_backend", dynamic=False)
        yield f"{name} compiled", far(compiled(*on_hpu(*inputs)), wanted)
    yield "grouped", [is_gqa(q, k), is_gqa(q, q), is_gqa(q, k[:, :1])]
    pairs = (
        torch.stack((cos[..., :4], cos[..., :4]), -1).flatten(-2),
        torch.stack((sin[..., :4],) * 2, -1).flatten(-2),
    )
    interleaved = torch.stack((heads[..., :4], heads[..., 4:]), -1).flatten(-2)
    mode = RotaryPosEmbeddingMode.PAIRWISE
    found = apply_rotary_pos_emb(*on_hpu(interleaved, *pairs), None, 0, mode)
    yield "rotary pairs", far(found, torch.stack((turned.real, turned.imag), -1).flatten(-2))


def experts() -> Iterator[tuple[str, Any]]:
    """D-32: three of four experts, of which each token has two."""
    first, last, num, hidden, inner = 1, 3, 4, 6, 5
    rows, scores = torch.randn(7, hidden), torch.rand(7, num).softmax(-1)
    weights, table = scores.topk(2)
    gate, up = (torch.randn(num, inner, hidden) / 2 for _ in range(2))
    down = torch.randn(num, hidden, inner) / 2
    chosen = range(first, last + 1)

    def mixed(answer: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Each token by itself, and each of its experts."""
        found = torch.zeros_like(rows)
        for row, expert in ((row, slot) for row in range(len(rows)) for slot in range(2)):
            number = int(table[row, expert])
            if number in chosen:
                found[row] += weights[row, expert] * answer(number, rows[row])
        return found

    def plain(number: int, row: torch.Tensor) -> torch.Tensor:
        return down[number] @ (functional.silu(gate[number] @ row) * (up[number] @ row))

    def experts_of(*stacks: torch.Tensor, is_permuted: bool = True) -> list[list[torch.Tensor]]:
        return [on_hpu(*(stack[i] if is_permuted else stack[i].t() for i in chosen)) for stack in stacks]

    call, inputs = torch.ops.hpu.mixture_of_experts, on_hpu(rows, table, weights)
    how = {"activation": "silu", "experts_min": first, "experts_max": last}

    def fused(rows: torch.Tensor, w12: list[torch.Tensor], w3: list[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = call(
            hidden_states=rows,
            expert_routing_table=inputs[1],
            router_weights=inputs[2],
            w12=w12,
            w3=w3,
            permuted_weights=True,
            chunk_size=64,
            total_experts=num,
            **how,
        )
        return found

    both = torch.cat((gate, up), 1)
    yield "experts", far(fused(inputs[0], *experts_of(both, down)), mixed(plain))
    made = torch.compile(fused, backend="hpu_backend", fullgraph=True, dynamic=False)
    yield "experts compiled", far(made(inputs[0], *experts_of(both, down)), mixed(plain))
    apart = experts_of(gate, up, down, is_permuted=False)
    yield "experts apart", far(call(*inputs, *apart, False, *how.values()), mixed(plain))
    yield "experts biased", far(*_biased(call, inputs, experts_of, mixed, (both, down)))


def _biased(
    call: Any, inputs: Any, experts_of: Any, mixed: Any, weights: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """gpt-oss's experts, as transformers writes them (``GptOssExperts._apply_gate``)."""
    both, down = weights
    biases = [torch.randn(stack.shape[:2]) for stack in weights]

    def answer(number: int, row: torch.Tensor) -> torch.Tensor:
        values = both[number] @ row + biases[0][number]
        gate, up = values[::2].clamp(max=7.0), values[1::2].clamp(-7.0, 7.0)
        found: torch.Tensor = (
            down[number] @ ((up + 1) * gate * torch.sigmoid(1.702 * gate)) + biases[1][number]
        )
        return found

    lists = experts_of(both, down, *biases)
    found = call.bias_fused_weights(*inputs, *lists, permuted_weights=True, experts_min=1, experts_max=3)
    return found, mixed(answer)


def indices() -> Iterator[tuple[str, Any]]:
    """D-27."""
    table, last = torch.arange(6, device="hpu").view(3, 2), torch.tensor([-1], device="hpu")
    yield "last rows", [table.index_select(0, last).tolist(), functional.embedding(last, table).tolist()]
    spread = torch.compile(lambda rows: functional.one_hot(rows, 3) * 1, backend="hpu_backend")
    yield "one hot", spread(torch.tensor([-1, 1], device="hpu")).tolist()


def streams() -> Iterator[tuple[str, Any]]:
    """D-29."""
    side = torch.hpu.Stream()
    first, last = (torch.hpu.Event(enable_timing=True) for _ in range(2))
    first.record()
    with torch.hpu.stream(side):
        side.wait_stream(torch.hpu.default_stream())
        yield "current stream", torch.hpu.current_stream() is side
        copied = torch.arange(3, device="hpu").to("cpu", non_blocking=True)
    last.record(side)
    last.synchronize()
    yield "after it", torch.hpu.current_stream() is torch.hpu.default_stream()
    yield "copied", copied.tolist()
    yield "in order", first.elapsed_time(last) >= 0


def random_numbers() -> Iterator[tuple[str, Any]]:
    """D-30."""

    def drawn(generator: torch.Generator | None = None) -> list[float]:
        found: list[float] = torch.empty(4, device="hpu").exponential_(generator=generator).cpu().tolist()
        return found

    seeded = [drawn(torch.Generator(device="hpu").manual_seed(seed)) for seed in (3, 3, 4)]
    yield "a generator", [seeded[0] == seeded[1], seeded[0] == seeded[2]]
    torch.hpu.random.manual_seed_all(5)
    state, first = torch.hpu.get_rng_state(), drawn()
    torch.hpu.set_rng_state(state)
    again = drawn()
    torch.manual_seed(5)
    yield "the device's", [first == again, first == drawn()]


def collectives() -> Iterator[tuple[str, Any]]:
    """D-31, in a world of one; `two_ranks.py` has the others."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("hccl", store=store, rank=0, world_size=1)
    ones = torch.ones(2, device="hpu")
    torch.distributed.all_reduce(ones)
    torch.distributed.broadcast(ones, 0)
    yield "a sum", ones.cpu().tolist()


def hpu_graphs() -> Iterator[tuple[str, Any]]:
    """D-23: a replay in warm-up gives what the shapes gave before, by position or by keyword, as vllm-gaudi calls models."""
    from habana_frameworks.torch.hpu.graphs import wrap_in_hpu_graph

    module = torch.nn.Identity()
    module.forward = lambda x, y: x + y  # type: ignore[method-assign]
    wrap_in_hpu_graph(module)
    one = torch.ones(2, device="hpu")
    first = module(x=one, y=one)
    yield "replayed", [first.tolist(), module(x=one, y=one * 3, warmup_mode=True) is first]
    yield "computed", module(one, y=one * 3).tolist()


def compile_only() -> Iterator[tuple[str, Any]]:
    """D-17, of a graph that makes tensors, of one that writes to a cache, and of operators outside graphs."""
    from habana_frameworks.torch.internal.bridge_config import env_setting

    cache, table = torch.zeros(4, 2, device="hpu"), torch.arange(6.0, device="hpu").view(3, 2)
    ids, rows = on_hpu(torch.tensor([99, -7]), torch.tensor([1, 2]))

    def write(kept: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        kept.index_copy_(0, index, new)
        return kept[:2] + 1

    written = torch.compile(write, backend="hpu_backend", dynamic=False)
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        found = functional.embedding(ids, table)
        yield "embedded", list(found.shape)
        written(cache, rows, found)
        cache.index_copy_(0, rows, found)
        cache.copy_(torch.ones(4, 2, device="hpu"))
        cache[1:3] = 5
        yield "ids", torch.arange(2, device="hpu").tolist()
        yield "to the device and back", torch.tensor([1, 2]).to("hpu").tolist()
        made = torch.compile(lambda x: x + torch.arange(3, device=x.device), backend="hpu_backend")
        yield "made", list(made(torch.ones(2, 3, device="hpu")).shape)
    yield "cache", float(cache.abs().sum())
    yield "afterwards", (table[1] + 1).tolist()


def main() -> None:
    """Prints everything."""
    with torch.inference_mode():
        parts = (
            kernels(),
            experts(),
            indices(),
            streams(),
            random_numbers(),
            collectives(),
            hpu_graphs(),
            compile_only(),
        )
        found = {name: value for part in parts for name, value in part}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
