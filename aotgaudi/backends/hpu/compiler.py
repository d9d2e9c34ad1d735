"""Compiles a unit to recipes, on a card. Offline only.

A unit is compiled by running it: on sample inputs, the results of which are compared with eager's on the CPU. So what is
sealed has run. The bridge stores recipes in this process's directory, and says which keys the unit has looked up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, fx

from aotgaudi.backends.base import CompiledUnit, Target, Unit
from aotgaudi.backends.hpu.artifact import TEXT_FILE, UNIT_FILE, HpuUnit
from aotgaudi.backends.hpu.card import acquired_to_compile, one_line, put, synchronize
from aotgaudi.backends.hpu.frontend import Run, compiled, require_stable_keys
from aotgaudi.backends.inductor.check import check
from aotgaudi.errors import AotGaudiError, CompileError, TargetError
from aotgaudi.gaudi.counters import Counts
from aotgaudi.gaudi.environment import recipe_directory
from aotgaudi.gaudi.recipes import collect, scan
from aotgaudi.graphs.canonical import InputSpec, from_text, is_open


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
        known = (
            {pair.key for pair in scan(recipe_directory()).pairs} if recipe_directory().is_dir() else set()
        )
        before = self._card.counts()
        run = compiled(graph)
        error, tolerance = self._checked(graph, specs, run, unit.label)
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

    def _checked(
        self, graph: fx.GraphModule, specs: list[InputSpec], run: Run, label: str
    ) -> tuple[float, float]:
        try:
            return check_unit(graph, specs, run, label)
        except AotGaudiError:
            raise
        except Exception as error:  # The bridge's own errors have no common type.
            raise CompileError(f"{label}: {one_line(error)}") from error

    def _collected(self, counts: Counts, known: set[str], unit: Unit, work_dir: Path) -> dict[str, Path]:
        self._card.flush()
        keys = counts.recipes
        if (
            not self._card.counters.knows_recipes
        ):  # What is new belongs to the unit; the proof finds what was not.
            keys = frozenset({pair.key for pair in scan(recipe_directory()).pairs} - known)
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
