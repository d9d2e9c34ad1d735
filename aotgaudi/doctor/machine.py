"""What this machine can build and serve: six checks. They import no torch, compile nothing and change nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aotgaudi
from aotgaudi.backends.base import NOT_INSTALLED, version_of
from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import cpu_features, levels_within, tool_version
from aotgaudi.errors import EXTRAS, SpecError, StoreError
from aotgaudi.gaudi.identity import PLUGIN
from aotgaudi.machine import Memory, available_cores, available_memory
from aotgaudi.store.location import NETWORK_FILE_SYSTEMS, file_system
from aotgaudi.store.store import Store

Status = Literal["ok", "warning", "error"]
"""`error`: broken, or keeps something installed here from working. `warning`: missing, or a hindrance."""

Purpose = Literal["build", "serve"]


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One examined thing.

    Attributes:
        subject: What was examined.
        status: Its state.
        observation: What was seen, in one line.
        remedy: What would be right; empty if all is well.
        prevents: What this machine therefore cannot do.
    """

    subject: str
    status: Status
    observation: str
    remedy: str = ""
    prevents: tuple[Purpose, ...] = ()


TOOLS = ("g++", "ld", "strip")
"""The programs that a build calls."""

WORKER_BYTES = 1_000_000_000
"""The memory that a build's worker may take, including the compilers that it starts."""

TOOLCACHE_BYTES = 300_000_000
"""The space of a build's own files in the store: precompiled headers, some 270 MB."""

ROOM_BYTES = 2_000_000_000
"""With less, a store is soon full: it also holds a small model's results, and those of other models and versions."""

_ELSEWHERE = "in another environment than the Gaudi bridge's: "
_BOTH: tuple[Purpose, ...] = ("build", "serve")
_CONSTRAINTS = Path(aotgaudi.__file__).with_name("constraints.txt")
"""The versions with which the tests ran. The wheel contains this file."""


def examine_machine(store_root: Path) -> Iterator[MachineFinding]:
    """Yields the findings in the order in which you would fix them."""
    bridge = version_of(PLUGIN)
    packages = of_packages(bridge)
    yield packages
    yield from of_torch(version_of("torch"), version_in(_CONSTRAINTS, "torch"), bridge)
    yield of_tools(is_needed="build" not in packages.prevents)
    yield of_cpu(cpu_features())
    yield of_memory(available_memory(), available_cores())
    yield of_store(store_root)


def of_packages(bridge: str = NOT_INSTALLED) -> MachineFinding:
    """Whether aotgaudi runs on this Python and system, and what building and serving need is installed.

    `bridge` is the version of Gaudi's plugin of torch, next to which no other torch may be installed.
    """
    bits = 64 if sys.maxsize > 1 << 32 else 32
    seen = (
        f"Python {platform.python_version()}, {bits} bits,"
        f" {platform.system()} {platform.release()} on {platform.machine()}"
    )
    if sys.platform != "linux" or bits != 64:
        return MachineFinding("packages", "error", seen, "a 64-bit Python on Linux", _BOTH)
    lacking = {purpose: missing for purpose in _BOTH if (missing := missing_modules(purpose))}
    if not lacking:
        return MachineFinding("packages", "ok", f"{seen}; all of [build] and [serve]")
    names = "; ".join(f"[{purpose}] lacks {', '.join(missing)}" for purpose, missing in lacking.items())
    elsewhere = _ELSEWHERE if "build" in lacking and bridge != NOT_INSTALLED else ""
    remedy = f"{elsewhere}pip install 'aotgaudi[{','.join(lacking)}]'"
    return MachineFinding("packages", "warning", f"{seen}; {names}", remedy, tuple(lacking))


def missing_modules(extra: str) -> tuple[str, ...]:
    """Returns the modules of `extra` that are not installed."""
    return tuple(name for name in EXTRAS[extra] if version_of(name) == NOT_INSTALLED)


def version_in(constraints: Path, package: str) -> str:
    """Returns the version of a package in a file of pip's constraints; empty if the file has none."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        name, is_pinned, rest = line.partition("==")
        if is_pinned and name.strip() == package:
            return rest.partition(";")[0].strip()
    return ""


def of_torch(found: str, tested: str, bridge: str = NOT_INSTALLED) -> Iterator[MachineFinding]:
    """Whether torch has the tested minor version. No finding if torch is not installed, because the extras report that.

    Next to `bridge`, Gaudi's plugin of torch, another version is right, but then nothing can be built or served here.
    """
    if found == NOT_INSTALLED:
        return
    minor = tested.rpartition(".")[0]
    if f"{found}.".startswith(f"{minor}."):
        yield MachineFinding("torch", "ok", f"{found}; bundles are for this version alone")
        return
    seen = f"{found}; aotgaudi {aotgaudi.__version__} is for {minor}"
    if bridge == NOT_INSTALLED:
        yield MachineFinding("torch", "error", seen, f"torch {tested}", _BOTH)
    else:
        seen = f"{seen}, and this one belongs to the Gaudi bridge {bridge}"
        yield MachineFinding("torch", "warning", seen, f"{_ELSEWHERE}torch {tested}", _BOTH)


def of_tools(*, is_needed: bool) -> MachineFinding:
    """Which compiler a build would call. Without `is_needed` nothing could be built here anyway."""
    try:
        versions = [f"{shutil.which(tool)}: {tool_version(tool)}" for tool in TOOLS]
    except SpecError as error:
        status: Status = "error" if is_needed else "warning"
        return MachineFinding("compiler", status, error.problem, error.remedy, ("build",))
    return MachineFinding("compiler", "ok", "; ".join(versions))


def of_cpu(features: frozenset[str]) -> MachineFinding:
    """Which instruction set a build would choose, and which bundles could run."""
    levels = [level.name for level in levels_within(features)]
    cores = f"{available_cores()} of {os.cpu_count()} cores"
    if not levels:
        seen = f"{platform.machine()}, none of {', '.join(ISA_LEVELS)}; {cores}"
        return MachineFinding("cpu", "error", seen, "an x86-64 processor with AVX2", _BOTH)
    lower = f", runs {' and '.join(levels[:-1])} as well" if levels[:-1] else ""
    return MachineFinding("cpu", "ok", f"{platform.machine()}, builds for {levels[-1]}{lower}; {cores}")


def of_memory(memory: Memory, num_cores: int) -> MachineFinding:
    """Whether there is memory for one worker a core."""
    seen = f"{_size(memory.free_bytes)} of {_size(memory.total_bytes)} free, limits of control groups counted"
    if memory.free_bytes >= WORKER_BYTES * num_cores:
        return MachineFinding("memory", "ok", seen)
    workers = memory.free_bytes // WORKER_BYTES
    remedy = f"build with -j {workers}" if workers else f"{_size(WORKER_BYTES)} for each worker of a build"
    return MachineFinding("memory", "warning", f"{seen}: {num_cores} workers may need more", remedy)


def of_store(root: Path) -> MachineFinding:
    """Whether builds can use or make the store, and how much room there is."""
    try:
        if _is_filled(root):
            Store.open(root, create=False)
    except (StoreError, OSError) as error:
        return MachineFinding("store", "error", str(error), "another place: --store DIR", ("build",))
    there = next(place for place in (root, *root.absolute().parents) if os.path.exists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = f"{root}: {there} is not a directory that uid {os.geteuid()} may write to"
        return MachineFinding(
            "store", "error", problem, "its permissions changed, or another place", ("build",)
        )
    status = os.statvfs(there)
    free, kind = status.f_bavail * status.f_frsize, file_system(there)
    seen = f"{root}{'' if there == root else ', not made yet'}: {kind or 'file system unknown'}, {_size(free)} free"
    if free < TOOLCACHE_BYTES:
        return MachineFinding(
            "store", "error", seen, f"{_size(TOOLCACHE_BYTES)} at least, or another place", ("build",)
        )
    if kind in NETWORK_FILE_SYSTEMS:
        seen = f"{seen}; on a network, where other machines may use it, too"
    if free < ROOM_BYTES:
        return MachineFinding("store", "warning", seen, f"{_size(ROOM_BYTES)} or more")
    return MachineFinding("store", "ok", seen)


def _is_filled(path: Path) -> bool:
    """Whether something exists there. A build makes a store of an empty directory. Raises OSError."""
    if not os.path.exists(path):  # Also False if we may not look; Path would raise.
        return False
    return not path.is_dir() or any(path.iterdir())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
