"""Compiles a unit to recipes, on a card. Offline only.

A unit is compiled by running it: on sample inputs, the results of which are compared with eager's on the CPU. So what is
sealed has run. The bridge stores recipes in this process's directory, and says which keys the unit has looked up.

Then `look` runs whole programs in a new process, on stand-ins for weights and caches, and says which recipes it did not
find: a recipe's key may depend on what produced a unit's inputs (K-10), so that a unit needs other recipes in a program than
alone. Numbers do not count there: keys follow from shapes, and one tensor of zeros stands for all of a shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx

from aotgaudi.backends.base import CompiledUnit, Target, Unit
from aotgaudi.backends.hpu.artifact import TEXT_FILE, UNIT_FILE, HpuUnit, read_unit
from aotgaudi.backends.hpu.card import acquired_to_compile, one_line, put, synchronize
from aotgaudi.backends.hpu.frontend import Run, compiled, require_stable_keys
from aotgaudi.backends.inductor.check import check
from aotgaudi.errors import AotGaudiError, CompileError, TargetError
from aotgaudi.gaudi.counters import Counts
from aotgaudi.gaudi.environment import recipe_directory
from aotgaudi.gaudi.recipes import collect, scan
from aotgaudi.graphs.canonical import InputSpec, from_text, is_open
from aotgaudi.graphs.program import Call, Program


class HpuCompiler:
    """Compiles units for one target. One instance a worker process; not thread-safe."""

    def __init__(self, target: Target) -> None:
        """Acquires the card.

        Raises CardError where it cannot be, CompileError where it is another one, or has keys that do not repeat.
        """
        self._card = acquired_to_compile()
        try:
            self._card.require(target)
        except TargetError as error:
            raise CompileError(str(error)) from error
        require_stable_keys(self._card)

    def compile(self, unit: Unit, work_dir: Path) -> CompiledUnit:
        """Runs the unit, compares it with eager and collects its recipes. Raises CompileError naming the unit."""
        started = time.perf_counter()
        graph, specs = from_text(unit.text)
        if any(map(is_open, specs)):
            raise CompileError(f"{unit.label}: leaves the number of KV blocks open, which a recipe fixes")
        known = _stored_keys() if recipe_directory().is_dir() else frozenset()
        before = self._card.counts()
        run = compiled(graph)
        try:
            error, tolerance = check_unit(graph, specs, run, unit.label)
        except AotGaudiError:
            raise
        except Exception as problem:  # The bridge's own errors have no common type.
            raise CompileError(f"{unit.label}: {one_line(problem)}") from problem
        counts = self._card.counts().since(before)
        if counts.fallbacks:
            raise CompileError(f"{unit.label}: {counts.fallbacks} operators fell back to the CPU")
        files = self._collected(counts, known, unit, work_dir)
        return CompiledUnit(
            files=files,
            compile_seconds=time.perf_counter() - started,
            max_abs_error=error,
            tolerance=tolerance,
        )

    def _collected(
        self, counts: Counts, known: frozenset[str], unit: Unit, work_dir: Path
    ) -> dict[str, Path]:
        self._card.flush()
        # Without a count of each recipe, what is new belongs to the unit; the proof finds what was not.
        keys = counts.recipes if self._card.counters.knows_recipes else _stored_keys() - known
        if not keys:
            raise CompileError(f"{unit.label}: the bridge looked up no recipe")
        try:
            found = collect(recipe_directory(), keys)
        except CompileError as error:
            raise CompileError(f"{unit.label}: {error}") from error
        text, descriptor = work_dir / TEXT_FILE, work_dir / UNIT_FILE
        text.write_text(unit.text, encoding="utf-8")
        kept = sorted(keys - set(found.uncached), key=int)
        descriptor.write_bytes(HpuUnit(recipes=tuple(kept), uncached=found.uncached).dumps())
        return {TEXT_FILE: text, UNIT_FILE: descriptor, **found.files}


def _stored_keys() -> frozenset[str]:
    """Returns the keys of the recipes in this process's directory."""
    return frozenset(pair.key for pair in scan(recipe_directory()).pairs)


def check_unit(graph: fx.GraphModule, specs: list[InputSpec], run: Run, label: str) -> tuple[float, float]:
    """Compares a unit's results with eager's on the CPU: returns the error and what was allowed.

    Raises CompileError, naming `label`, where they differ.
    """
    return check(graph, specs, _FromCpu(run), label)


class _FromCpu:
    """Runs a unit on copies of CPU tensors, and copies back what it has written."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs, on the CPU."""
        placed = [put(tensor) for tensor in inputs]
        outputs = [output.cpu() for output in self._run(placed)]
        synchronize()
        for tensor, there in zip(inputs, placed, strict=True):
            tensor.copy_(there.cpu())
        return outputs


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
    known = _stored_keys()
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
    return tuple(missed), collect(recipe_directory(), _stored_keys() - known).files


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
