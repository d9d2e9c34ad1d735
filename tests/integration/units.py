"""Functions compiled as units and loaded as a server loads them: what the tests of kernels run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aotgaudi.backends.base import Unit
from aotgaudi.backends.inductor.compiler import InductorCompiler
from aotgaudi.backends.inductor.probe import probe
from aotgaudi.backends.inductor.runtime import ARTIFACT_FILE, InductorRuntime
from aotgaudi.digest import Key
from aotgaudi.graphs.canonical import to_text


class Compiled:
    """One function of tensors, compiled for a level."""

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Any], folder: Path, level: str = "native"
    ) -> None:
        class Call(torch.nn.Module):
            def forward(self, *inputs: Any) -> Any:
                return function(*inputs)

        target = probe(level)
        text = to_text(torch.export.export(Call(), tuple(inputs), strict=False).graph)
        made = InductorCompiler(target).compile(Unit(text, Key.of([("text", "x")]), "unit"), folder)
        self.layouts, self.code = made.layouts, made.files[ARTIFACT_FILE].read_bytes()
        self._runtime = InductorRuntime(target)
        self._unit = self._runtime.load(made.files)

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Returns what the function gives. Weights are in the order in which `inputs` have them, whatever the layout."""
        prepared = list(inputs)
        for place, layout in self.layouts.items():
            prepared[place] = self._runtime.prepare(layout, prepared[place])
        return list(self._unit.run(prepared))


class Calls:
    """Calls with inputs of several shapes, by name, as one unit: many compile almost as fast as one.

    Each call is a function and inputs for it; all functions give as many tensors.
    """

    def __init__(
        self,
        calls: Mapping[str, tuple[Callable[..., Any], list[Tensor]]],
        folder: Path,
        level: str = "native",
    ) -> None:
        self._inputs = {name: inputs for name, (_, inputs) in calls.items()}

        def call_all(given: dict[str, list[Tensor]]) -> list[Any]:
            return [function(*given[name]) for name, (function, _) in calls.items()]

        self.unit = Compiled(call_all, [self._inputs], folder, level)

    def run(self, name: str, inputs: list[Tensor]) -> list[Tensor]:
        """Returns what the call of this name gives for `inputs`."""
        given = {**self._inputs, name: inputs}
        found = self.unit.run(*(tensor for each in given.values() for tensor in each))
        size, place = len(found) // len(given), list(given).index(name)
        return found[size * place : size * (place + 1)]
