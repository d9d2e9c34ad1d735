"""Weights by name, as tensors over the memory that they were read into, and then as units take them.

Copied once more only to convert a dtype, to join them, or to put them in a layout of the device's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from aotgaudi.graphs.program import WEIGHT, TensorSpec, rebound
from aotgaudi.graphs.quantization import quantization_of
from aotgaudi.machine import available_cores
from aotgaudi.runtime.bindings import WeightBinding
from aotgaudi.runtime.shards import ShardReader, StoredTensor

_MAX_THREADS = 8


def load_weights(
    reader: ShardReader, specs: Iterable[TensorSpec], passing: Collection[str] = ()
) -> dict[str, Tensor]:
    """Returns name -> tensor for every spec. Raises as `ShardReader.take` does.

    A tensor of another floating dtype is converted, and what it was read into is given back. So is the memory of those in
    `passing` once their tensor is let go.
    """
    wanted = {spec.name: spec for spec in specs}
    stored = reader.take(wanted.values(), passing)
    return {name: _tensor(stored.pop(name), spec.dtype) for name, spec in wanted.items()}


def _tensor(stored: StoredTensor, dtype: str) -> Tensor:
    if not stored.data:
        return torch.empty(stored.shape, dtype=getattr(torch, dtype))
    flat = torch.frombuffer(stored.data, dtype=getattr(torch, stored.dtype))
    return flat.reshape(stored.shape).to(getattr(torch, dtype))


def bind_weights(
    bindings: Iterable[WeightBinding],
    stored: dict[str, Tensor],
    prepare: Callable[[str, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Returns binding -> tensor as units take it: joined, in 8 bits, and in the layout that `prepare` puts a tensor in.

    Takes out of `stored` what no other binding wants as soon as a binding has it, so that no more weights are there twice
    than there are threads: one a core, each of which computes on its core alone. `prepare` is called from all of them.
    Raises SpecError where a weight cannot be put in 8 bits, and what `prepare` raises.
    """
    of_names: dict[tuple[str, ...], list[WeightBinding]] = {}
    for binding in bindings:
        of_names.setdefault(binding.names, []).append(binding)
    num_uses, lock = Counter(name for names in of_names for name in names), Lock()

    def bind(names: tuple[str, ...]) -> dict[str, Tensor]:
        made = _bound(of_names[names], _joined([stored[name] for name in names]), prepare)
        with lock:
            num_uses.subtract(names)
            for name in set(names):
                if not num_uses[name]:
                    del stored[name]
        return made

    def num_bytes(names: tuple[str, ...]) -> int:
        return sum(stored[name].nbytes for name in names)

    largest_first = sorted(of_names, key=num_bytes, reverse=True)
    num_threads = min(_MAX_THREADS, available_cores())
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return {text: tensor for made in pool.map(bind, largest_first) for text, tensor in made.items()}


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bound(
    bindings: Iterable[WeightBinding], weight: Tensor, prepare: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns the bindings of one weight, which is joined already. All packed tensors of a quantization are made at once."""
    made = {WEIGHT: weight}
    found: dict[str, Tensor] = {}
    for binding in bindings:
        quantization = quantization_of(binding.source)
        if quantization is not None and binding.source not in made:
            packed = quantization.pack(weight, rebound(binding.source, binding.names))
            made.update(zip(quantization.sources, packed, strict=True))
        tensor = made[binding.source]
        found[binding.text] = tensor if binding.layout is None else prepare(binding.layout, tensor)
    return found
