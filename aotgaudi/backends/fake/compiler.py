"""Deterministic bytes instead of code."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from aotgaudi.backends.base import CompiledUnit, Target, Unit
from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import CompileError

_SLOW_SECONDS = 0.2
_NOISE_BYTES = 16


class FakeCompiler:
    """Writes a file that follows from the unit's text, or misbehaves as the unit's label says."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def compile(self, unit: Unit, work_dir: Path) -> CompiledUnit:
        """Returns the artifact. Raises CompileError for ``!fail`` and ``!wrong``."""
        if journal := self._target.flags.get("journal"):
            with Path(journal).open("a", encoding="ascii") as file:
                file.write(f"{unit.key.hex}\n")
        if "!fail" in unit.label:
            raise CompileError(f"{unit.label}: told to fail")
        if "!wrong" in unit.label:
            raise CompileError(f"{unit.label}: the compiled graph differs from eager by 1, allowed 0")
        if "!die" in unit.label:
            os.kill(os.getpid(), signal.SIGKILL)
        if "!hang" in unit.label:
            threading.Event().wait()
        if "!slow" in unit.label:
            threading.Event().wait(_SLOW_SECONDS)
        path = work_dir / "unit.bin"
        noise = os.urandom(_NOISE_BYTES) if "!random" in unit.label else b""
        path.write_bytes(b"aotgaudi.fake/1\n" + sha256_bytes(unit.text.encode()).encode() * 64 + noise)
        return CompiledUnit(files={path.name: path}, compile_seconds=0.0, max_abs_error=0.0, tolerance=0.0)
