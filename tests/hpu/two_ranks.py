"""One of two ranks beside the double: ``two_ranks.py RANK FILE`` meets the other at FILE and prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Seen = Iterator[tuple[str, Any]]


def on_card(rank: int, num: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the numbers from ``10 * rank`` on."""
    return (torch.arange(num) + 10 * rank).to(dtype).to("hpu")


def eager(rank: int) -> Seen:
    """What vllm-gaudi and vLLM's groups call."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        summed = on_card(rank, dtype=dtype)
        dist.all_reduce(summed)
        yield f"sum, {dtype}", summed.tolist()
    gathered = torch.empty(4, device="hpu")
    dist.all_gather_into_tensor(gathered, on_card(rank))
    yield "gathered", gathered.tolist()
    parts = [torch.empty(2, device="hpu") for _ in range(2)]
    dist.all_gather(parts, on_card(rank))
    yield "gathered apart", [part.tolist() for part in parts]
    scattered = torch.empty(2, device="hpu")
    dist.reduce_scatter_tensor(scattered, on_card(rank, 4))
    yield "scattered", scattered.tolist()
    told = on_card(rank)
    dist.broadcast(told, 1)
    yield "told", told.tolist()
    swapped = torch.empty(2, device="hpu")
    dist.all_to_all_single(swapped, on_card(rank))
    yield "swapped", swapped.tolist()
    passed = on_card(rank)
    (dist.send if rank == 0 else dist.recv)(passed, 1 - rank)
    yield "passed", passed.tolist()
    view = on_card(rank, 6).view(3, 2)
    work = dist.all_reduce(view[1], async_op=True)
    work.wait()
    yield "a row", view.tolist()
    alone = [dist.new_group([one], backend="hccl") for one in range(2)][rank]
    kept = on_card(rank)
    dist.all_reduce(kept, group=alone)
    dist.barrier()
    yield "alone", kept.tolist()


def compiled(rank: int) -> Seen:
    """The same in graphs."""
    pieces: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
        "sum": (_summed, 2),
        "gathered": (_gathered, 2),
        "scattered": (_scattered, 4),
    }
    for name, (function, num) in pieces.items():
        made = torch.compile(function, backend="hpu_backend", fullgraph=True, dynamic=False)
        yield f"compiled {name}", made(on_card(rank, num)).tolist()


def _summed(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    dist.all_reduce(y)
    return y * 2


def _gathered(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(4, device=x.device)
    dist.all_gather_into_tensor(found, x + 1)
    return found.reshape(2, 2).movedim(0, 1).reshape(4) * 2


def _scattered(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(2, device=x.device)
    dist.reduce_scatter_tensor(found, x + 1)
    return found * 2


def main() -> None:
    """Prints everything, and the card that this rank has."""
    rank, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("hccl", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    with torch.inference_mode():
        found = dict(eager(rank)) | dict(compiled(rank))
    found["card"] = int(torch.ops.hpu_double.module())
    json.dump(found, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
