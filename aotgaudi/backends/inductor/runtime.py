"""Loads shared objects as executables. Online: no dynamo, no inductor, no compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from aotgaudi.backends.base import HostPlacement, Plan, RunPlan, Target
from aotgaudi.backends.inductor import interface, native
from aotgaudi.backends.inductor.levels import TILE_FEATURE
from aotgaudi.backends.inductor.probe import require_satisfied
from aotgaudi.digest import Digest
from aotgaudi.errors import ManifestError, TargetError

ARTIFACT_FILE = interface.ARTIFACT_FILE
REORDERED = "onednn"
"""The layout of a weight [out, in] reordered by oneDNN for products of few rows. Only oneDNN reads it."""
PACKED = "panels"
"""The layout of packed_linear.h: panels of 16 outputs, with the weights of two inputs at a time. Receipts name it so."""

_PANEL = 16
_ROWS = 1
"""The number of rows that oneDNN is told to expect. It hardly matters: measured with 1 to 512."""


class InductorExecutable:
    """One loaded unit.

    `native` is None for a unit of an earlier version, which can be run by torch's own class alone.
    """

    __slots__ = ("native", "run")
    run: Callable[[Sequence[Any]], list[Any]]

    def __init__(self, library: Path) -> None:
        """Raises RuntimeError or OSError where the loader refuses it."""
        self.native = native.load_unit(library)
        if self.native is None:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
            self.run = cast("Callable[[Sequence[Any]], list[Any]]", runner.run)
        else:
            self.run = native.run_alone(self.native)


class InductorRuntime:
    """Loads units that were compiled for one target, on the CPU. Thread-safe."""

    def __init__(self, target: Target) -> None:
        """Raises TargetError, before anything is mapped, unless this machine and process can run such code."""
        require_satisfied(target)
        if TILE_FEATURE in target.isa and not torch.cpu._init_amx():
            raise TargetError(
                "target: compiled for AMX, and the kernel does not give this process its tiles"
                " (arch_prctl is not allowed, or the kernel is older than 5.16)"
            )

    @property
    def placement(self) -> HostPlacement:
        """Units run on the tensors of this process's memory."""
        return HostPlacement()

    def restore(self, files: Iterable[tuple[str, Digest, Path]]) -> None:
        """Does nothing: a unit is loaded from its own files."""

    def rehearse(self, runs: Mapping[str, Callable[[], object]]) -> None:
        """Does nothing: a unit that is loaded can only run."""

    def load(self, files: Mapping[str, Path]) -> InductorExecutable:
        """Maps a verified object. Raises TargetError if the loader refuses it."""
        try:
            return InductorExecutable(files[ARTIFACT_FILE])
        except (RuntimeError, OSError) as error:
            raise TargetError(
                f"{_name_of(files[ARTIFACT_FILE])}: cannot be loaded: {str(error).splitlines()[0]}"
            ) from error

    def prepare(self, layout: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in the layout that a unit takes. Raises TargetError for an unknown layout."""
        if layout == PACKED:
            return packed(tensor)
        if layout != REORDERED:
            raise TargetError(
                f"target: a unit takes a weight in the layout {layout!r}, which is not known here"
            )
        prepared: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(tensor, _ROWS)
        return prepared

    def join(self, plan: Plan) -> RunPlan | None:
        """Returns a function that runs a whole plan without the interpreter; None if a unit of it cannot run so."""
        units = [step.unit.native for step in plan.steps if isinstance(step.unit, InductorExecutable)]
        found = [unit for unit in units if unit is not None]
        if len(found) < len(plan.steps) or not found:
            return None
        for unit, step in zip(found, plan.steps, strict=True):
            if (unit.num_inputs, unit.num_outputs) != (len(step.inputs), len(step.outputs)):
                raise ManifestError(
                    f"a program calls a unit with {len(step.inputs)} inputs and {len(step.outputs)} outputs,"
                    f" it has {unit.num_inputs} and {unit.num_outputs}"
                )
        calls = [
            native.Call(unit, step.inputs, step.outputs) for unit, step in zip(found, plan.steps, strict=True)
        ]
        return native.NativeProgram(plan, calls).run

    def num_compiled(self) -> int:
        """Returns how many graphs inductor has compiled in this process; 0 if it was never imported."""
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return 0
        counts = utils.counters["inductor"]
        return int(counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"])


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight [out, in] as packed_linear.h reads it: [out / 16, in / 2, 16, 2], padded with zeros.

    `weight` is bfloat16 or int8.
    """
    num_out, num_in = weight.shape
    more = (0, num_in % 2, 0, -num_out % _PANEL)
    is_whole = not any(more)  # Torch copies even to pad by nothing.
    padded = weight.contiguous() if is_whole else torch.nn.functional.pad(weight, more)
    pair = torch.int16 if weight.dtype is torch.int8 else torch.int32
    pairs = padded.view(pair).view(-1, _PANEL, padded.shape[1] // 2)
    return pairs.transpose(1, 2).contiguous().view(weight.dtype).view(*pairs.shape[::2], _PANEL, 2)


def _name_of(path: Path) -> str:
    """Returns a name for people: for an open file (``/proc/self/fd/<n>``), the name that it was opened by."""
    return str(path.readlink()) if path.is_symlink() else str(path)
