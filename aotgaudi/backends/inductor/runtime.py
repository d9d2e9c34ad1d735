"""Shared object -> executable. Online: no dynamo, no inductor, no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from aotgaudi.backends.base import Target
from aotgaudi.backends.inductor.probe import require_satisfied
from aotgaudi.errors import TargetError

ARTIFACT_FILE = "unit.so"


class InductorExecutable:
    """One loaded unit: a call is a few microseconds plus the unit's own work."""

    __slots__ = ("run",)

    def __init__(self, library: Path) -> None:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)  # type: ignore[attr-defined]
        self.run = runner.run
        """(inputs: list of tensors in the unit's order) -> list of outputs."""


class InductorRuntime:
    """Loads units on the CPU. Thread-safe."""

    def check(self, target: Target) -> None:
        """Raises TargetError unless this machine satisfies `target`. Call it before anything is mapped."""
        require_satisfied(target)

    def load(self, files: Mapping[str, Path]) -> InductorExecutable:
        """Maps a verified object. Raises TargetError where the loader refuses it."""
        try:
            return InductorExecutable(files[ARTIFACT_FILE])
        except RuntimeError as error:
            raise TargetError(
                f"{files[ARTIFACT_FILE]}: cannot be loaded: {str(error).splitlines()[0]}"
            ) from error
