"""Runs whole programs in a new process, on stand-ins for weights and caches, and says which recipes it did not find.

A recipe's key may depend on what produced a unit's inputs (K-10), so that a unit needs other recipes in a program than
alone. Numbers do not count here: keys follow from shapes, and one tensor of zeros stands for all of a shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aotgaudi.backends.base import Target
from aotgaudi.backends.hpu.artifact import read_unit
from aotgaudi.backends.hpu.card import acquired_to_compile, put
from aotgaudi.backends.hpu.compiler import check_unit
from aotgaudi.backends.hpu.frontend import Run, compiled
from aotgaudi.gaudi.environment import recipe_directory
from aotgaudi.gaudi.recipes import collect, scan
from aotgaudi.graphs.canonical import InputSpec, from_text
from aotgaudi.graphs.program import Call, Program


@dataclass(frozen=True)
class StoredUnit:
    """A unit's files, and whether its recipes are another compilation's, so that its numbers must be compared again."""

    label: str
    files: Mapping[str, Path]
    is_foreign: bool


def look(
    programs: Iterable[Program], units: Mapping[str, StoredUnit], target: Target
) -> tuple[tuple[tuple[str, str], ...], Mapping[str, Path]]:
    """Runs every program. Returns what was compiled, (label of a unit, key), and the files that this has left.

    Raises CompileError for wrong numbers, CardError where no card can be acquired.
    """
    card = acquired_to_compile()
    card.require(target)
    known = {pair.key for pair in scan(recipe_directory()).pairs}
    stage = _Stage()
    loaded = {key: stage.load(unit) for key, unit in units.items()}
    missed: dict[tuple[str, str], None] = {}
    for program in programs:
        results: dict[str, Tensor] = {}
        for call in program.calls:
            before = card.counts()
            loaded[call.unit].run(call, results)
            counts, unit = card.counts().since(before), loaded[call.unit]
            keys = counts.misses.keys() - set(unit.uncached)
            if not card.counters.knows_recipes and counts.compiled > len(unit.uncached):
                keys = {"of unknown key"}
            missed.update(dict.fromkeys((unit.label, key) for key in sorted(keys)))
    card.flush()
    new_keys = {pair.key for pair in scan(recipe_directory()).pairs} - known
    return tuple(missed), collect(recipe_directory(), new_keys).files


class _Stage:
    """Loads units; keeps one stand-in a shape, dtype and place: one tensor in two places would be another graph."""

    def __init__(self) -> None:
        self._stand_ins: dict[tuple[str, tuple[object, ...], int], Tensor] = {}

    def load(self, unit: StoredUnit) -> _Loaded:
        text, descriptor = read_unit(unit.files)
        graph, specs = from_text(text)
        run = compiled(graph)
        if unit.is_foreign:
            check_unit(graph, specs, run, unit.label)
        return _Loaded(self, unit.label, run, specs, descriptor.uncached)

    def stand_in(self, spec: InputSpec, number: int) -> Tensor:
        dtype, sizes, _ = spec
        name = dtype, tuple(sizes), number
        if name not in self._stand_ins:
            zeros = torch.zeros([int(size) for size in sizes], dtype=getattr(torch, dtype))
            self._stand_ins[name] = put(zeros)
        return self._stand_ins[name]


@dataclass(frozen=True)
class _Loaded:
    stage: _Stage
    label: str
    compiled: Run
    specs: list[InputSpec]
    uncached: tuple[str, ...]

    def run(self, call: Call, results: dict[str, Tensor]) -> None:
        """Runs the unit on results of earlier calls, and on stand-ins for all else."""
        inputs = [
            results.get(binding.removeprefix("tmp:")) if binding.startswith("tmp:") else None
            for binding in call.inputs
        ]
        placed = [
            self.stage.stand_in(spec, number) if tensor is None else tensor
            for number, (tensor, spec) in enumerate(zip(inputs, self.specs, strict=True))
        ]
        results.update(zip(call.outputs, self.compiled(placed), strict=True))
