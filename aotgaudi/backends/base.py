"""The interface of a device: a target, a compiler (offline) and a runtime (online). Imports no torch.

A device is one folder with three files: ``probe.py`` (the target), ``compiler.py`` (unit -> artifact) and ``runtime.py``
(artifact -> executable). They share only this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from aotgaudi.digest import Digest, Key
from aotgaudi.document import Value
from aotgaudi.errors import MissingPackageError

if TYPE_CHECKING:  # `aotgaudi run` need not import what counts memory.
    from aotgaudi.manifest.memory import MemoryNeed

NOT_INSTALLED = "not installed"
"""The version of a missing package in a key. Nothing is ever compiled under such a key."""


def version_of(package: str) -> str:
    """Returns the version of an installed package, or `NOT_INSTALLED`. Imports nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def require_installed(extra: str, *packages: str) -> None:
    """Raises MissingPackageError, naming `extra`, unless all `packages` are installed."""
    for package in packages:
        if version_of(package) == NOT_INSTALLED:
            raise MissingPackageError(package, extra)


FIXED_NUM_BLOCKS = frozenset({"hpu"})
"""Backends whose graphs fix the size of the KV cache. Others leave it open (graphs/canonical.py)."""


def keeps_caches_on_host(backend: str) -> bool:
    """Whether the KV caches lie in memory of this machine, so that it can be reserved before torch is imported."""
    return backend == "cpu"


class Target(Value):
    """The target of compiled code. Every key has all of it.

    `isa` is the sorted list of CPU features that the generated code may use (names as in ``/proc/cpuinfo``). A machine
    satisfies a target if it has at least these. `toolchain` maps a component to its version, which must match exactly.
    `flags` are the compile options.
    """

    backend: Literal["cpu", "cuda", "hpu", "fake"]
    machine: str
    isa: tuple[str, ...] = ()
    toolchain: dict[str, str] = Field(default_factory=dict)
    flags: dict[str, str] = Field(default_factory=dict)

    def components(self) -> tuple[tuple[str, str], ...]:
        """Returns named key components, one per factor, in a fixed order."""
        return (
            ("target.backend", self.backend),
            ("target.machine", self.machine),
            ("target.isa", " ".join(self.isa)),
            *((f"target.toolchain.{name}", value) for name, value in sorted(self.toolchain.items())),
            *((f"target.flags.{name}", value) for name, value in sorted(self.flags.items())),
        )

    def as_file(self) -> str:
        """Returns the text of a file for ``--target`` (docs/formats/target.md), without the last line feed."""
        return json.dumps(self.model_dump(mode="json"), indent=2)


@dataclass(frozen=True, slots=True)
class Unit:
    """A graph to compile. Its canonical text is all of it (see graphs/canonical.py)."""

    text: str
    key: Key
    label: str
    """For people only, e.g. ``layer prompt(1, 128, 4)``; in no key."""


@dataclass(frozen=True, slots=True)
class CompiledUnit:
    """The result of compiling: files by relative name, and the result of the check against eager.

    `layouts` has the layout of each input that the unit takes reordered, by the input's number.
    """

    files: Mapping[str, Path]
    compile_seconds: float
    max_abs_error: float
    tolerance: float
    layouts: Mapping[int, str] = field(default_factory=dict)


class Compiler(Protocol):
    """Offline half of a device. Runs in a worker process."""

    def compile(self, unit: Unit, work_dir: Path) -> CompiledUnit:
        """Compiles `unit` into files under `work_dir` and checks them against eager. Raises CompileError."""
        ...


class Executable(Protocol):
    """One loaded unit. Not thread-safe: one thread runs the engine's steps."""

    @property
    def run(self) -> Callable[[Sequence[Any]], list[Any]]:
        """Runs the unit on tensors in its order and returns its outputs. May write to KV inputs."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a plan, whose tensors are in numbered slots."""

    unit: Executable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole program: calls over numbered slots.

    `slots` has the permanent tensors, and None elsewhere. Each run provides the first `num_inputs`. Slots in `transient` are
    empty between runs.
    """

    slots: Sequence[Any]
    num_inputs: int
    steps: Sequence[Step]
    outputs: Sequence[int]
    transient: Sequence[int]


RunPlan = Callable[[Sequence[Any]], list[Any]]
"""Runs a plan on its inputs; returns its outputs. One thread at a time."""


class Placement(Protocol):
    """Where tensors are when units run on them. Almost nothing is to be done on the CPU."""

    def require(self, need: MemoryNeed) -> None:
        """Raises TargetError unless the device has that much memory left."""
        ...

    def put(self, tensor: Any) -> Any:
        """Returns a tensor on the device: this one if it is there, else a copy."""
        ...

    def get(self, tensor: Any) -> Any:
        """Returns a tensor on the CPU: this one if it is there, else a copy."""
        ...

    def clear(self, cache: Any, blocks: Sequence[int], block_size: int) -> None:
        """Fills blocks of a cache with zeros, without compiling anything."""
        ...


class HostPlacement:
    """Memory of this process, where all tensors are."""

    def require(self, need: MemoryNeed) -> None:
        """Does nothing: caches get their pages when they are made."""

    def put(self, tensor: Any) -> Any:
        """Returns the tensor."""
        return tensor

    def get(self, tensor: Any) -> Any:
        """Returns the tensor."""
        return tensor

    def clear(self, cache: Any, blocks: Sequence[int], block_size: int) -> None:
        """Fills blocks of a cache [planes, blocks, ...] with zeros."""
        cache[:, list(blocks)] = 0


class Runtime(Protocol):
    """Online half of a device. Never compiles."""

    @property
    def placement(self) -> Placement:
        """Where the tensors of this device's units are."""
        ...

    def restore(self, files: Iterable[tuple[str, Digest, Path]]) -> None:
        """Takes the verified files (name, digest, path) of all units, before the first of them is loaded."""
        ...

    def rehearse(self, runs: Mapping[str, Callable[[], object]]) -> None:
        """Runs programs (label -> run) as the device needs before anything is served.

        Raises TargetError if that compiled anything. `num_compiled` counts from there on.
        """
        ...

    def load(self, files: Mapping[str, Path]) -> Executable:
        """Loads a verified artifact. Raises TargetError or CorruptError."""
        ...

    def prepare(self, layout: str, tensor: Any) -> Any:
        """Returns a tensor in the layout that a unit takes. Thread-safe.

        Raises TargetError for an unknown layout.
        """
        ...

    def join(self, plan: Plan) -> RunPlan | None:
        """Returns a function that runs a whole plan at once; None if it must be run call by call."""
        ...

    def num_compiled(self) -> int:
        """Returns how many graphs the device's compiler has compiled in this process. Never decreases."""
        ...
