"""A backend without a device, for tests of everything around one. It ships, so that users can test too.

Artifacts are deterministic bytes. A unit whose label holds ``!fail``, ``!hang``, ``!die`` or ``!wrong``
misbehaves in that way, one with ``!slow`` takes 0.2 s, and one with ``!random`` ends in other bytes each time.
Every compile appends its key to the file named by the flag ``journal``, if given.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path

from aotgaudi.backends.base import CompiledUnit, Target, Unit
from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import CompileError
from aotgaudi.source_digest import sha256_source

_SLOW_SECONDS = 0.2
_NOISE_BYTES = 16


def probe(flags: dict[str, str] | None = None) -> Target:
    """Returns the fake target; `flags` become part of it, and of every key."""
    toolchain = {"fake": "1", "torch": "none", "compile_code": compile_code_digest()}
    return Target(backend="fake", machine="any", toolchain=toolchain, flags=flags or {})


@functools.cache
def compile_code_digest() -> str:
    """Returns the sha256 of this source."""
    return sha256_source([Path(__file__)])


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
