"""Loads the programs and weights that a server runs on from a bundle and a model directory. Never compiles.

Objects are mapped only after the bundle was verified (bundle/verify.py) and the target checked. Weights are tensors over the
memory that they were read into. They are copied again only to convert a dtype, to concatenate or quantize them, or to put
them in a layout of the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from aotgaudi.backends.base import Executable, Runtime
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.digest import Digest
from aotgaudi.entries import Entry
from aotgaudi.errors import CorruptError, SpecError, first_line
from aotgaudi.graphs.program import WEIGHT, CacheSpec, Program, TensorSpec, rebound
from aotgaudi.graphs.quantization import quantization_of
from aotgaudi.machine import in_threads
from aotgaudi.manifest.memory import KvCache, MemoryNeed, tensor_bytes, tensors_bytes
from aotgaudi.phases import Phases
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable
from aotgaudi.runtime.memory import cache_memory
from aotgaudi.runtime.weights import ShardReader, StoredTensor, WeightBinding, placed, weight_bindings


def load_weights(reader: ShardReader, specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """Returns a tensor for every spec, by name. Raises as `ShardReader.take` does, and SpecError for integers out of range.

    A tensor of another floating or integer dtype is converted, and the memory that it was read into is freed.
    """
    wanted = {spec.name: spec for spec in specs}
    stored = reader.take(wanted.values())
    return {name: _tensor(stored.pop(name), spec) for name, spec in wanted.items()}


def _tensor(stored: StoredTensor, spec: TensorSpec) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if not stored.data:
        return torch.empty(stored.shape, dtype=dtype)
    flat = torch.frombuffer(stored.data, dtype=getattr(torch, stored.dtype))
    converted = flat.to(dtype)
    if converted is not flat and not dtype.is_floating_point and not _is_same(flat, converted):
        raise SpecError(
            f"weights: {spec.name}",
            f"has numbers of {stored.dtype} that {spec.dtype} has not",
            "use the model that the bundle was built for",
        )
    return converted.reshape(stored.shape)


def _is_same(integers: Tensor, converted: Tensor) -> bool:
    """Returns whether conversion kept all values. A value out of range does not convert back, or has another sign."""
    return torch.equal(converted.to(integers.dtype), integers) and torch.equal(converted < 0, integers < 0)


def bind_weights(
    bindings: Iterable[WeightBinding],
    stored: dict[str, Tensor],
    prepare: Callable[[str, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Returns a tensor for each binding in the form that units take: concatenated, quantized, and in `prepare`'s layout.

    Each weight is removed from `stored` after its last use, so that at most one weight per thread is in memory twice. There
    is one thread per core, up to a limit. Each computes on one core, and all call `prepare`.

    Raises SpecError for a weight that cannot be quantized, and the errors of `prepare`.
    """
    of_names: dict[tuple[str, ...], list[WeightBinding]] = {}
    for binding in bindings:
        of_names.setdefault(binding.names, []).append(binding)
    num_uses, lock = Counter(name for names in of_names for name in names), Lock()

    def bind(names: tuple[str, ...]) -> dict[str, Tensor]:
        parts = [stored[name] for name in names]
        made = _bound(of_names[names], parts[0] if len(parts) == 1 else torch.cat(parts), prepare)
        with lock:
            num_uses.subtract(names)
            for name in set(names):
                if not num_uses[name]:
                    del stored[name]
        return made

    def num_bytes(names: tuple[str, ...]) -> int:
        return sum(stored[name].nbytes for name in names)

    largest_first = sorted(of_names, key=num_bytes, reverse=True)
    found = in_threads(bind, largest_first, begin_thread=lambda: torch.set_num_threads(1))
    return {text: tensor for made in found for text, tensor in made.items()}


def _bound(
    bindings: Iterable[WeightBinding], weight: Tensor, prepare: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns the tensors of all bindings of one concatenated weight. Makes all packed tensors of a quantization at once."""
    made = {WEIGHT: weight}
    found: dict[str, Tensor] = {}
    for binding in bindings:
        quantization = quantization_of(binding.source)
        if quantization is not None and binding.source not in made:
            packed = quantization.pack(weight, rebound(binding.source, binding.names))
            made.update(zip(quantization.sources, packed, strict=True))
        tensor = made[binding.source]
        found[binding.text] = tensor if binding.layout is None else prepare(binding.layout, tensor)
    return found


@dataclass(frozen=True)
class Artifacts:
    """The verified artifacts of a bundle."""

    receipt: Receipt
    program: Callable[[str], Program]
    """Entry id -> program."""
    read: Callable[[Digest], bytes]
    """Digest -> verified bytes."""
    path: Callable[[Digest], Path]
    """Digest -> path that opens the verified bytes. No other library of this process was loaded from the same path."""


class Loader:
    """Loads programs over the weights of one model. Units, weights and constants are loaded once and shared."""

    def __init__(
        self,
        runtime: Runtime,
        weights: ShardReader,
        num_blocks: int,
        reserved: Mapping[str, memoryview] = MappingProxyType({}),
    ) -> None:
        """The KV caches get `num_blocks` blocks, at least 1, and the padding block.

        `reserved` has memory for caches by name (`aotgaudi.runtime.memory.cache_memory`). Other caches get theirs at `load`.
        """
        self._runtime = runtime
        self._weights = weights
        self._num_blocks, self._reserved = num_blocks, dict(reserved)
        self._units: dict[str, Executable] = {}
        self._tensors: dict[str, Tensor] = {}
        self._constants: dict[Digest, Mapping[str, Tensor]] = {}

    def load(
        self,
        entries: Iterable[Entry],
        artifacts: Artifacts,
        table: ExecutableTable,
        phases: Phases | None = None,
    ) -> None:
        """Adds the entries, which all have a program, to `table`, and times it in `phases`. Called once."""
        phases = phases or Phases()
        digests = {entry: artifacts.receipt.programs[entry.id] for entry in entries}
        programs = {
            digest: placed(artifacts.program(entry.id), artifacts.receipt)
            for digest, entry in {digest: entry for entry, digest in digests.items()}.items()
        }
        with phases.time("layouts"):
            self._runtime.restore(_files(programs.values(), artifacts))
            self._runtime.placement.require(need_of(programs.values(), self._num_blocks))
            table.placement = self._runtime.placement
            self._add_weights(programs.values())
            self._add_caches(programs.values(), table)
        with phases.time("units"):
            self._add_units(programs.values(), artifacts)
        with phases.time("bind_programs"):
            bound = {digest: self._bind(program, artifacts) for digest, program in programs.items()}
            for entry, digest in digests.items():
                table.add(entry, bound[digest])

    def rehearse(self, table: ExecutableTable, block_size: int) -> None:
        """Runs every program of `table` as far as the device needs it before serving. See `Runtime.rehearse`."""
        placement = self._runtime.placement
        self._runtime.rehearse({str(entry): program.run_on_zeros for entry, program in table.programs()})
        # A rehearsal may leave NaN in block 0, which padding reads.
        for cache in table.caches:
            placement.clear(cache, [0], block_size)

    def _add_units(self, programs: Iterable[Program], artifacts: Artifacts) -> None:
        for key in (key for program in programs for key in program.unit_keys()):
            if key not in self._units:
                files = artifacts.receipt.units[key].artifact
                self._units[key] = self._runtime.load(
                    {name: artifacts.path(digest) for name, digest in files.items()}
                )

    def _bind(self, program: Program, artifacts: Artifacts) -> BoundProgram:
        tensors = {**self._tensors, **self._constants_of(program, artifacts)}
        return BoundProgram(program, self._units, tensors, self._runtime.join, self._runtime.placement.put)

    def _constants_of(self, program: Program, artifacts: Artifacts) -> Mapping[str, Tensor]:
        if program.constants is None:
            return {}
        digest = Digest.parse(program.constants)
        if digest not in self._constants:
            try:
                tensors = load_tensors(artifacts.read(digest))
            except (SafetensorError, KeyError, ValueError) as error:
                raise CorruptError(
                    f"object {digest}: is no file of constants: {first_line(error)}"
                ) from error
            put = self._runtime.placement.put
            self._constants[digest] = {f"const:{name}": put(value) for name, value in tensors.items()}
        return self._constants[digest]

    def _add_weights(self, programs: Collection[Program]) -> None:
        specs = {spec.name: spec for program in programs for spec in program.weights}
        bindings = list(weight_bindings(programs))
        if bindings:
            wanted = {name: specs[name] for binding in bindings for name in binding.names}
            stored = load_weights(self._weights, wanted.values())
            bound, put = bind_weights(bindings, stored, self._runtime.prepare), self._runtime.placement.put
            while bound:  # One by one, so that only one is in memory twice.
                text, tensor = bound.popitem()
                self._tensors[text] = put(tensor)

    def _add_caches(self, programs: Iterable[Program], table: ExecutableTable) -> None:
        """Makes zeroed caches. Padding reads block 0, so it must not hold NaN."""
        specs = {spec.name: spec for program in programs for spec in program.caches}
        for spec in specs.values():
            cache = self._tensors[f"kv:{spec.name}"] = self._runtime.placement.put(self._cache(spec))
            table.caches.append(cache)

    def _cache(self, spec: CacheSpec) -> Tensor:
        memory = self._reserved.pop(spec.name, None)
        if memory is None:
            memory = cache_memory([spec], self._num_blocks)[spec.name]
        flat = torch.frombuffer(memory, dtype=getattr(torch, spec.dtype))
        return flat.reshape(spec.sizes(self._num_blocks))


class _Stays(Protocol):
    """The tensors of a program, bound or just traced, that stay in memory."""

    @property
    def weights(self) -> tuple[TensorSpec, ...]: ...

    @property
    def caches(self) -> tuple[CacheSpec, ...]: ...


def need_of(programs: Collection[_Stays], num_blocks: int) -> MemoryNeed:
    """Returns the memory for all tensors of `programs` that stay in a server with `num_blocks` blocks."""
    weights = (spec for program in programs for spec in program.weights)
    caches = {spec.name: spec for program in programs for spec in program.caches}.values()
    num_bytes = sum(tensor_bytes(spec.sizes(num_blocks), spec.dtype) for spec in caches)
    block_bytes = num_bytes // (num_blocks + 1)
    cache = KvCache(block_bytes, fixed_bytes=block_bytes)
    return MemoryNeed(cache=cache, num_blocks=num_blocks, weights_bytes=tensors_bytes(weights))


def _files(programs: Iterable[Program], artifacts: Artifacts) -> Iterator[tuple[str, Digest, Path]]:
    """Yields the files of all units of `programs`, and the recipes that only whole programs use."""
    receipt = artifacts.receipt
    keys = dict.fromkeys(key for program in programs for key in program.unit_keys())
    for files in (*(receipt.units[key].artifact for key in keys), receipt.recipes):
        for name, digest in files.items():
            yield name, digest, artifacts.path(digest)
