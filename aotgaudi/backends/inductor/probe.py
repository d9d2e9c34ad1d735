"""What the inductor backends compile for, and whether this machine satisfies it. Imports no torch."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.errors import SpecError, TargetError


@dataclass(frozen=True, slots=True)
class IsaLevel:
    """An instruction-set level: compiler's ``-march``, vector width in bits, and the features it needs."""

    march: str
    simdlen: int
    features: tuple[str, ...]


_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
ISA_LEVELS = {
    "avx2": IsaLevel("x86-64-v3", 256, _V3),
    "avx512": IsaLevel(
        "x86-64-v4", 512, tuple(sorted((*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")))
    ),
}
"""The x86-64 micro-architecture levels of the psABI; names of features as in /proc/cpuinfo."""

COMPILE_FLAGS = {
    "aotgaudi.revision": "1",
    "aot_inductor.compile_wrapper_opt_level": "O1",
    "cpp.threads": "1",
}
"""Inductor options that decide what code comes out; ``aotgaudi.revision`` stands for what compiler.py does
besides, and is raised when that changes the artifacts. Generated loops are single-threaded: matrix products,
which dominate, still use the process's thread count, and two OpenMP threads under contention can make a
0.1 ms loop take 7 ms."""


def probe(isa: str) -> Target:
    """Returns the target for `isa` (``native``: the best level that this machine has).

    Raises SpecError where no compiler is found or the machine has no such level.
    """
    level_name = _resolve(isa, cpu_features())
    level = ISA_LEVELS[level_name]
    return Target(
        backend="cpu",
        machine=platform.machine(),
        isa=level.features,
        toolchain={"torch": metadata.version("torch"), "compiler": _compiler_version()},
        flags={**COMPILE_FLAGS, "cpp.march": level.march, "cpp.simdlen": str(level.simdlen)},
    )


def require_satisfied(target: Target) -> None:
    """Raises TargetError, naming the factor, unless this machine can run code compiled for `target`."""
    here = {"machine": platform.machine(), "torch": metadata.version("torch")}
    wanted = {"machine": target.machine, "torch": target.toolchain.get("torch", "")}
    for factor, value in wanted.items():
        if here[factor] != value:
            raise TargetError(
                f"target: compiled for {factor} {value}, this machine has {here[factor]}; rebuild here: aotgaudi build SPEC"
            )
    missing = sorted(set(target.isa) - cpu_features())
    if missing:
        raise TargetError(
            f'target: compiled for a CPU with {", ".join(missing)}, which this one lacks; rebuild with target.isa = "avx2"'
        )


def cpu_features() -> frozenset[str]:
    """Returns the CPU's feature names as /proc/cpuinfo gives them (empty where there is no such file)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _resolve(isa: str, features: frozenset[str]) -> str:
    have = [name for name, level in ISA_LEVELS.items() if features.issuperset(level.features)]
    if isa == "native" and have:
        return have[-1]
    if isa in have:
        return isa
    raise SpecError(
        "target.isa",
        f"{isa!r} cannot be built on this machine",
        f"it has: {', '.join(have) or 'none of ' + ', '.join(ISA_LEVELS)}",
    )


def _compiler_version() -> str:
    path = shutil.which("g++")
    if path is None:
        raise SpecError("target", "no C++ compiler found", "install g++")
    done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, check=True)
    return f"g++ {done.stdout.strip()}"
