"""Bundle + model directory -> everything that a server runs on. Never compiles.

Objects are mapped only after the bundle has been verified (bundle/verify.py) and the target checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from aotgaudi.backends.base import Executable, Runtime
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.digest import Digest
from aotgaudi.entries import Entry, SamplerEntry
from aotgaudi.graphs.program import CacheSpec, Program
from aotgaudi.phases import Phases
from aotgaudi.runtime.bindings import passing_weights, placed, weight_bindings
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable
from aotgaudi.runtime.pages import cache_memory
from aotgaudi.runtime.shards import ShardReader
from aotgaudi.runtime.weights import bind_weights, load_weights


@dataclass(frozen=True)
class Artifacts:
    """Where verified artifacts come from: a bundle, or the store after a build on first use."""

    receipt: Receipt
    program: Callable[[str], Program]
    """Entry id -> program."""
    read: Callable[[Digest], bytes]
    """Digest -> verified bytes."""
    path: Callable[[Digest], Path]
    """Digest -> path that opens what was verified, and that no other library of this process has been loaded from."""


class Loader:
    """Loads programs over the weights of one model; units, weights and constants are loaded once and shared."""

    def __init__(
        self,
        runtime: Runtime,
        weights: ShardReader,
        num_blocks: int,
        reserved: Mapping[str, memoryview] = MappingProxyType({}),
    ) -> None:
        """The KV caches get `num_blocks` blocks, at least 1, besides the padding block.

        `reserved` has memory for them by name (`aotgaudi.runtime.pages.cache_memory`); others get theirs when they load.
        """
        self._runtime = runtime
        self._weights = weights
        self._num_blocks, self._reserved = num_blocks, dict(reserved)
        self._units: dict[str, Executable] = {}
        self._tensors: dict[str, Tensor] = {}
        self._constants: dict[Digest, Mapping[str, Tensor]] = {}
        self._bound: dict[Digest, BoundProgram] = {}

    def load(
        self,
        entries: Iterable[Entry],
        artifacts: Artifacts,
        table: ExecutableTable,
        phases: Phases | None = None,
    ) -> None:
        """Adds the entries that the receipt has programs for to `table`; the others stay cold. `phases` times it."""
        phases = phases or Phases()
        found = [
            (entry, artifacts.receipt.programs[entry.id])
            for entry in entries
            if entry.id in artifacts.receipt.programs
        ]
        fresh = {digest: entry for entry, digest in found if digest not in self._bound}
        programs = {
            digest: placed(artifacts.program(entry.id), artifacts.receipt) for digest, entry in fresh.items()
        }
        with phases.time("layouts"):
            self._add_weights(programs.values())
            table.caches += self._add_caches(programs.values())
        with phases.time("units"):
            self._add_units(programs.values(), artifacts)
        with phases.time("bind_programs"):
            for digest, program in programs.items():
                self._bound[digest] = self._bind(program, artifacts)
            for entry, digest in found:
                table.add(entry, self._bound[digest])

    def _add_units(self, programs: Iterable[Program], artifacts: Artifacts) -> None:
        for key in (key for program in programs for key in program.unit_keys()):
            if key not in self._units:
                files = artifacts.receipt.units[key].artifact
                self._units[key] = self._runtime.load(
                    {name: artifacts.path(digest) for name, digest in files.items()}
                )

    def _bind(self, program: Program, artifacts: Artifacts) -> BoundProgram:
        tensors = {**self._tensors, **self._constants_of(program, artifacts)}
        return BoundProgram(program, self._units, tensors, self._runtime.join)

    def _constants_of(self, program: Program, artifacts: Artifacts) -> Mapping[str, Tensor]:
        if program.constants is None:
            return {}
        digest = Digest.parse(program.constants)
        if digest not in self._constants:
            tensors = load_tensors(artifacts.read(digest))
            self._constants[digest] = {f"const:{name}": value for name, value in tensors.items()}
        return self._constants[digest]

    def _add_weights(self, programs: Collection[Program]) -> None:
        specs = {spec.name: spec for program in programs for spec in program.weights}
        fresh = [binding for binding in weight_bindings(programs) if binding.text not in self._tensors]
        if fresh:
            wanted = {name: specs[name] for binding in fresh for name in binding.names}
            stored = load_weights(self._weights, wanted.values(), passing_weights(fresh))
            self._tensors |= bind_weights(fresh, stored, self._runtime.prepare)

    def _add_caches(self, programs: Iterable[Program]) -> list[Tensor]:
        """Makes one cache per layer, zeroed: padding reads from block 0, which must not hold NaNs. Returns the new ones."""
        specs = {spec.name: spec for program in programs for spec in program.caches}
        missing = [spec for name, spec in specs.items() if f"kv:{name}" not in self._tensors]
        memory = {
            **cache_memory((s for s in missing if s.name not in self._reserved), self._num_blocks),
            **{s.name: self._reserved.pop(s.name) for s in missing if s.name in self._reserved},
        }
        fresh = {f"kv:{spec.name}": self._cache(spec, memory[spec.name]) for spec in missing}
        self._tensors.update(fresh)
        return list(fresh.values())

    def _cache(self, spec: CacheSpec, memory: memoryview) -> Tensor:
        flat = torch.frombuffer(memory, dtype=getattr(torch, spec.dtype))
        return flat.reshape(spec.sizes(self._num_blocks))


def declare_samplers(entries: Iterable[Entry], table: ExecutableTable) -> None:
    """Declares all sampler entries to the table, warm or not."""
    for entry in entries:
        if isinstance(entry, SamplerEntry):
            table.declare_sampler(entry)
