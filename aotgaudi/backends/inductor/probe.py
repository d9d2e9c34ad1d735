"""The target of the inductor backend, and whether a machine satisfies it. Imports no torch."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from pathlib import Path
from types import MappingProxyType

from aotgaudi.backends.base import Target, version_of
from aotgaudi.backends.inductor.levels import ISA_LEVELS, IsaLevel
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.source_digest import sha256_source

COMPILE_FLAGS = {
    "aot_inductor.compile_wrapper_opt_level": "O1",
    "cpp.dynamic_threads": "1",
    "cpp.min_chunk_size": "2048",
    "cpp.threads": "16",
}
"""Inductor options that decide the generated code; names with ``aotgaudi.`` are for compiler.py. loops.py reads the last
three: the process's threads share loops over at least 32,768 numbers."""

NO_COMPILE_CODE = MappingProxyType(
    {
        "probe.py": "what it finds is in the target",
        "interface.py": "reads artifacts and makes none",
        "native.py": "runs artifacts and makes none",
        "runtime.py": "runs artifacts and makes none",
    }
)
"""Files of this folder that are left out of the digest of the compile code, with the reason."""

COMPILED_GRAPH_CODE = (
    "canonical.py",
    "choose_entries.py",
    "export.py",
    "paged_decode.py",
    "quantization.py",
    "quantized_linear.py",
    "sample_tokens.py",
)
"""Files of graphs/ that compiling a unit's text needs: how it is read, and the operators that it may call."""


def probe(isa: str) -> Target:
    """Returns the target for `isa` (``native``: the best level that this machine has).

    Compiler and linker are named by the first line of their ``--version``, distribution included, since two builds of one
    version of g++ have different defaults and give different bytes. Our part of the toolchain is named by a digest of its
    code.

    Raises SpecError if no compiler is found or the machine lacks the level.
    """
    level = _resolve(isa, cpu_features())
    return Target(
        backend="cpu",
        machine=platform.machine(),
        isa=level.features,
        toolchain={
            "torch": version_of("torch"),
            "compiler": tool_version("g++"),
            "linker": tool_version("ld"),
            "libc": " ".join(platform.libc_ver()),
            "compile_code": compile_code_digest(),
        },
        flags={**COMPILE_FLAGS, **_flags_of(level)},
    )


@functools.cache
def compile_code_digest() -> str:
    """Returns the sha256 of our code that turns a unit's text into an artifact. A change of it makes units compile anew."""
    folder = Path(__file__).parent
    files = [
        path
        for path in folder.rglob("*")
        if path.suffix in (".py", ".h") and path.relative_to(folder).as_posix() not in NO_COMPILE_CODE
    ]
    graphs = folder.parents[1] / "graphs"
    return sha256_source((*files, *(graphs / name for name in COMPILED_GRAPH_CODE)), folder.parents[1])


def this_machine() -> Target:
    """Returns what this machine offers to a bundle: its instruction set, with every feature, and its torch."""
    return Target(
        backend="cpu",
        machine=platform.machine(),
        isa=tuple(sorted(cpu_features())),
        toolchain={"torch": version_of("torch")},
    )


def require_satisfied(target: Target, machine: Target | None = None) -> None:
    """Raises TargetError, naming the factor, unless `machine` (None: this one) can run code compiled for `target`."""
    whose, where = ("this", "here") if machine is None else ("that", "there")
    machine = machine or this_machine()
    there = {"machine": machine.machine, "torch": machine.toolchain.get("torch", "")}
    wanted = {"machine": target.machine, "torch": target.toolchain.get("torch", "")}
    for factor, value in wanted.items():
        if there[factor] != value:
            raise TargetError(
                f"target: compiled for {factor} {value}, {whose} machine has {there[factor]};"
                f" rebuild {where}: aotgaudi build SPEC"
            )
    missing = sorted({*target.isa}.difference(machine.isa))
    if missing:
        levels = [level.name for level in levels_within(frozenset(machine.isa))]
        remedy = f'rebuild with target.isa = "{levels[-1]}"' if levels else "no level is low enough for it"
        raise TargetError(
            f"target: compiled for a CPU with {', '.join(missing)}, which {whose} one lacks; {remedy}"
        )


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the CPU's feature names from /proc/cpuinfo (empty without that file)."""
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _resolve(isa: str, features: frozenset[str]) -> IsaLevel:
    have = levels_within(features)
    if isa == "native" and have:
        return have[-1]
    for level in have:
        if level.name == isa:
            return level
    names = ", ".join(level.name for level in have) or "none of " + ", ".join(ISA_LEVELS)
    lacking = sorted(set(ISA_LEVELS[isa].features) - features) if isa in ISA_LEVELS else []
    raise SpecError(
        "target.isa",
        f"{isa!r} cannot be built on this machine" + (f", which lacks {', '.join(lacking)}" * bool(lacking)),
        f"it has: {names}",
    )


def _flags_of(level: IsaLevel) -> dict[str, str]:
    return {
        "aotgaudi.isa": level.name,
        "aotgaudi.compiler_flags": " ".join(level.compiler_flags),
        "cpp.simdlen": str(level.simdlen),
    }


def levels_within(features: frozenset[str]) -> list[IsaLevel]:
    """Returns the levels whose features a CPU has, the lowest first."""
    return [level for level in ISA_LEVELS.values() if features.issuperset(level.features)]


def tool_version(tool: str) -> str:
    """Returns the first line of a tool's ``--version``: ``g++ (Debian 12.2.0-14) 12.2.0``.

    Raises SpecError if the tool is missing or does not run.
    """
    path = shutil.which(tool)
    if path is None:
        raise SpecError("target", f"no C++ compiler found: {tool} is missing", "install g++ and binutils")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise SpecError(
            "target", f"{path} does not say its version: {error}", f"a {tool} that runs"
        ) from error
