"""Weights by name, from the safetensors files of a model directory. Mapped, and copied only to convert a dtype.

Every name that the programs ask for must be there, in the shape they ask for; nothing else is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aotgaudi.errors import SpecError
from aotgaudi.graphs.program import TensorSpec

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_REMEDY = "convert it with: aotgaudi model import SOURCE DIR"


def load_weights(model_dir: Path, specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """Returns name -> tensor for every spec. Raises SpecError naming the file or the tensor at fault.

    A tensor of another dtype is converted, which copies it; one of another shape belongs to another model.
    """
    wanted = {spec.name: spec for spec in specs}
    weights: dict[str, Tensor] = {}
    for path in _files(model_dir, wanted):
        try:
            with safe_open(path, framework="pt") as file:
                for name in wanted.keys() & set(file.keys()):
                    weights[name] = _fitting(file.get_tensor(name), wanted[name], path)
        except (SafetensorError, OSError) as error:
            raise SpecError(str(path), f"cannot be read as safetensors: {error}") from error
    missing = sorted(wanted.keys() - weights.keys())
    if missing:
        raise SpecError(
            str(model_dir), f"holds no tensor {missing[0]!r} ({len(missing)} missing in all)", _REMEDY
        )
    return weights


def _files(model_dir: Path, wanted: Iterable[str]) -> list[Path]:
    index = model_dir / _INDEX
    if not index.exists():
        single = model_dir / _SINGLE
        if not single.exists():
            raise SpecError(str(model_dir), f"has neither {_SINGLE} nor {_INDEX}", _REMEDY)
        return [single]
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(where[name]) for name in wanted if name in where}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(str(index), f"is not a safetensors index: {error}") from error
    if any(Path(name).name != name for name in names):
        raise SpecError(str(index), "names a file outside its directory")
    return [model_dir / name for name in sorted(names)]


def _fitting(tensor: Tensor, spec: TensorSpec, path: Path) -> Tensor:
    if tuple(tensor.shape) != spec.shape:
        raise SpecError(
            str(path),
            f"{spec.name} has shape {list(tensor.shape)}, the bundle needs {list(spec.shape)}",
            "use the model that the bundle was built for",
        )
    return tensor.to(getattr(torch, spec.dtype)).contiguous()
