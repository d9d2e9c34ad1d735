"""Shared object -> executable. Online: no dynamo, no inductor, no compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from aotgaudi.backends.base import Target
from aotgaudi.backends.inductor.probe import require_satisfied
from aotgaudi.errors import TargetError

ARTIFACT_FILE = "unit.so"


class InductorExecutable:
    """One loaded unit: a call is a few microseconds plus the unit's own work."""

    __slots__ = ("run",)
    run: Callable[[Sequence[Any]], list[Any]]

    def __init__(self, library: Path) -> None:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
        self.run = cast("Callable[[Sequence[Any]], list[Any]]", runner.run)


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
