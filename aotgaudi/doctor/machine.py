"""What this machine can build and serve: one finding for each thing that decides it.

The examination imports no torch and compiles nothing. The trial builds one entry of a tiny model in a temporary store, like
any build: it shows whether that works, and how long it takes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import aotgaudi
from aotgaudi.backends.base import NOT_INSTALLED, version_of
from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import cpu_features, levels_within, tool_version
from aotgaudi.child import python_command
from aotgaudi.compile.pipeline import Workers, compile_missing
from aotgaudi.compile.run import Watch
from aotgaudi.entries import DecodeEntry
from aotgaudi.errors import EXTRAS, AotGaudiError, BuildInterruptedError, SpecError, StoreError
from aotgaudi.gaudi.identity import PLUGIN, Inventory, find_cards
from aotgaudi.machine import Memory, available_cores, available_memory
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.runtime.seccomp import forbid_processes
from aotgaudi.server.options import DEFAULT_MAX_CONNECTIONS
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.store.location import NETWORK_FILE_SYSTEMS, file_system
from aotgaudi.store.memfd import SEALS
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


EXTRA_PURPOSES: Mapping[str, str] = MappingProxyType(
    {
        "build": "traces and compiles",
        "serve": "serves bundles",
        "ray": "builds on a Ray cluster",
        "s3": "reads and writes s3://",
        "gguf": "imports GGUF files",
        "otel": "sends traces of requests",
    }
)
"""The purpose of each extra."""

TOOLS = ("g++", "ld", "strip")
"""The programs that a build calls."""

WORKER_BYTES = 1_000_000_000
"""The memory that a build's worker may take, including the compilers that it starts."""

TOOLCACHE_BYTES = 300_000_000
"""The space of a build's own files in the store (docs/adr/0015-same-bytes.md: precompiled headers, some 270 MB)."""

ROOM_BYTES = 2_000_000_000
"""With less, a store is soon full: it also holds a small model's results, and those of other models and versions."""

_ELSEWHERE = "in another environment than the Gaudi bridge's: "

_BOTH: tuple[Purpose, ...] = ("build", "serve")
_CONSTRAINTS = Path(aotgaudi.__file__).with_name("constraints.txt")
"""The versions with which the tests ran. The wheel contains this file."""

_FILTER_SECONDS = 60.0

MANY_FILES = DEFAULT_MAX_CONNECTIONS + 1024
"""The connections that a server takes by default, plus the objects of a large bundle while it loads."""


def examine_machine(store_root: Path) -> Iterator[MachineFinding]:
    """Yields the findings in the order in which you would fix them. Takes a second or two, and changes nothing."""
    can_build, bridge = not missing_modules("build"), version_of(PLUGIN)
    yield of_system()
    yield from (of_extra(extra, bridge) for extra in EXTRAS)
    yield from of_torch(version_of("torch"), version_in(_CONSTRAINTS, "torch"), bridge)
    yield of_tools(is_needed=can_build)
    yield of_cpu(cpu_features())
    yield of_memory(available_memory(), available_cores())
    yield of_store(store_root)
    yield of_temporary_files()
    yield from kernel_findings()
    yield of_gaudi(find_cards())


def of_system() -> MachineFinding:
    """Whether aotgaudi runs on this Python and operating system."""
    bits = 64 if sys.maxsize > 1 << 32 else 32
    seen = (
        f"Python {platform.python_version()}, {bits} bits,"
        f" {platform.system()} {platform.release()} on {platform.machine()}"
    )
    if sys.platform == "linux" and bits == 64:
        return MachineFinding("python", "ok", seen)
    return MachineFinding("python", "error", seen, "a 64-bit Python on Linux", _BOTH)


def missing_modules(extra: str) -> tuple[str, ...]:
    """Returns the modules of `extra` that are not installed."""
    return tuple(name for name in EXTRAS[extra] if version_of(name) == NOT_INSTALLED)


def of_extra(extra: str, bridge: str = NOT_INSTALLED) -> MachineFinding:
    """Whether the packages of an extra are installed. A missing one is a warning: something cannot be done without it.

    `bridge` is the version of Gaudi's plugin of torch, next to which no other torch may be installed.
    """
    subject, missing = f"[{extra}]", missing_modules(extra)
    if not missing:
        return MachineFinding(
            subject, "ok", ", ".join(f"{name} {version_of(name)}" for name in EXTRAS[extra])
        )
    seen = f"{', '.join(missing)} not installed: needed by what {EXTRA_PURPOSES[extra]}"
    elsewhere = _ELSEWHERE if "torch" in EXTRAS[extra] and bridge != NOT_INSTALLED else ""
    remedy = f"{elsewhere}pip install 'aotgaudi[{extra}]'"
    needed_to: tuple[Purpose, ...] = tuple(purpose for purpose in _BOTH if purpose == extra)
    return MachineFinding(subject, "warning", seen, remedy, needed_to)


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
    return _of_place("store", root, TOOLCACHE_BYTES)


def of_temporary_files() -> MachineFinding:
    """Whether compilers can write temporary files."""
    try:
        place = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        return MachineFinding(
            "temporary files", "error", str(error), "a TMPDIR that can be written to", ("build",)
        )
    return _of_place("temporary files", place, 0)


def of_gaudi(found: Inventory) -> MachineFinding:
    """Which cards the driver shows. No card is not a problem."""
    if not found.cards:
        return MachineFinding("gaudi", "ok", "no card: manifests for them can be made and planned here")
    types = ", ".join(sorted({card.device_type for card in found.cards}))
    return MachineFinding(
        "gaudi",
        "ok",
        f"{len(found.cards)} of {types}, by {found.source}: `aotgaudi doctor --hpu` examines one",
    )


def _of_place(subject: str, path: Path, least_bytes: int) -> MachineFinding:
    """The state of a directory, or of the existing one in which it would be made."""
    there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = f"{path}: {there} is not a directory that uid {os.geteuid()} may write to"
        return MachineFinding(
            subject, "error", problem, "its permissions changed, or another place", ("build",)
        )
    status = os.statvfs(there)
    free, kind = status.f_bavail * status.f_frsize, file_system(there)
    seen = f"{path}{'' if there == path else ', not made yet'}: {kind or 'file system unknown'}, {_size(free)} free"
    if free < least_bytes:
        return MachineFinding(
            subject, "error", seen, f"{_size(least_bytes)} at least, or another place", ("build",)
        )
    if kind in NETWORK_FILE_SYSTEMS:
        seen = f"{seen}; on a network, where other machines may use it, too"
    if free < ROOM_BYTES:
        return MachineFinding(subject, "warning", seen, f"{_size(ROOM_BYTES)} or more")
    return MachineFinding(subject, "ok", seen)


def _is_filled(path: Path) -> bool:
    """Whether something exists there. A build makes a store of an empty directory. Raises OSError."""
    if not os.path.exists(path):  # Also False if we may not look; Path would raise.
        return False
    return not path.is_dir() or any(path.iterdir())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


# What serving asks of the kernel


def kernel_findings() -> Iterator[MachineFinding]:
    """Yields the findings. A separate process tries the filter, because it cannot be removed again."""
    yield of_filter(python_command("aotgaudi.doctor.machine"))
    yield of_sealed_memory()
    yield of_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def of_filter(command: list[str]) -> MachineFinding:
    """Whether the kernel can refuse new processes. `command` asks it to, and exits with 0 on success."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FILTER_SECONDS, check=False)
        problem = (
            "" if done.returncode == 0 else (done.stderr.splitlines() or ["it ended without a word"])[-1]
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if not problem:
        return MachineFinding("seccomp", "ok", "the kernel refuses to start processes for a server")
    return MachineFinding(
        "seccomp",
        "warning",
        f"no filter can be set, so that a server's guard is its hook in Python alone: {problem}",
        "a container profile that allows seccomp(2)",
    )


def of_sealed_memory() -> MachineFinding:
    """Whether code can be loaded the way a server does: from sealed anonymous memory."""
    try:
        descriptor = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(descriptor, b"\0")
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            mmap.mmap(descriptor, 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        finally:
            os.close(descriptor)
    except OSError as error:
        remedy = "a kernel and a container that allow memfd_create(2), seals, and code in such memory"
        return MachineFinding(
            "sealed memory", "error", f"cannot be used: {error.strerror}", remedy, ("serve",)
        )
    return MachineFinding("sealed memory", "ok", "objects can be sealed and code mapped from them")


def of_open_files(hard_limit: int) -> MachineFinding:
    """Whether a server may open all the files that it needs."""
    if hard_limit == resource.RLIM_INFINITY:
        return MachineFinding("open files", "ok", "no limit")
    if hard_limit >= MANY_FILES:
        return MachineFinding("open files", "ok", f"{hard_limit} at most")
    return MachineFinding(
        "open files",
        "warning",
        f"{hard_limit} at most: a server then takes fewer connections, and a large bundle may not load",
        f"{MANY_FILES} (`ulimit -Hn`, LimitNOFILE=, --ulimit nofile=)",
    )


def main() -> None:
    """Makes the kernel refuse new processes. Runs in a separate process. Raises TargetError if the kernel cannot."""
    forbid_processes()


# The trial

TRIAL_SECONDS = 180.0

_SPEC = {
    "schema": "aotgaudi.spec/1",
    "model": {
        "name": "trial",
        "dtype": "float32",
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": False,
            "vocab_size": 64,
        },
    },
    "limits": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "max_model_len": 16,
        "block_size": 16,
        "num_blocks": 1,
    },
}


def try_to_compile(seconds: float = TRIAL_SECONDS, num_workers: int | None = None) -> MachineFinding:
    """Traces, compiles and checks a decode step (an embedding, a layer and a head), and returns the finding.

    Args:
        seconds: The most that a job may take. After that time no other job begins, so the trial takes at most twice as long.
        num_workers: The number of processes; None: one a core.
    """
    manifest = Manifest.of(spec_from_json(_SPEC))
    entries = tuple(entry for entry in manifest.entries if isinstance(entry, DecodeEntry))[:1]
    began = time.monotonic()
    watch = Watch(should_stop=lambda: time.monotonic() - began > seconds)
    workers = Workers(num_workers, seconds)
    try:
        with tempfile.TemporaryDirectory(prefix="aotgaudi-doctor-") as folder:
            store = Store.open(Path(folder) / "store")
            outcome = compile_missing(manifest, store, entries, workers, watch)
    except BuildInterruptedError:
        return _failed(f"took longer than {seconds:g} s", "a machine that is less busy, or --trial-timeout")
    except (AotGaudiError, OSError) as error:
        return _failed(" ".join(str(error).split()), "see the message; builds fail the same way")
    return MachineFinding(
        "trial compile",
        "ok",
        f"a decode step of a tiny model: {outcome.num_traced} program traced, {len(outcome.compiled)} units compiled"
        f" and checked in {time.monotonic() - began:.1f} s, from an empty store, with {workers.num_local} workers",
    )


def _failed(problem: str, remedy: str) -> MachineFinding:
    return MachineFinding("trial compile", "error", problem, remedy, ("build",))
