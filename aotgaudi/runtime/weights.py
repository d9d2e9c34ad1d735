"""Weights by name, as tensors over the memory that they were read into. Copied once more only to convert a dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from aotgaudi.graphs.program import TensorSpec
from aotgaudi.runtime.shards import ShardReader, StoredTensor


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
