"""Reads tensors from safetensors files into private memory, and hashes the files if a bundle binds them. Imports no torch.

::

    file   = length header data           ; length: 8 bytes, little-endian; header: that many bytes of JSON
    header = {name: {"dtype": str, "shape": [int, ...], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}

(https://github.com/huggingface/safetensors#format; the rules below are those of its `validate`.) The tensors cover the data
from the first byte to the last, in any order and without overlap. The safetensors library keeps a file mapped, so that a
change in place changes the results, and truncating the file ends the process. Here the wanted tensors get private pages, and
the others are hashed and dropped. With ``map``, the file is mapped instead.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import FileIO
from types import MappingProxyType
from typing import Any, Literal

from aotgaudi.bundle.model_directory import BASE_PREFIX, MAX_TEXT_BYTES, WEIGHTS_REMEDY, ModelDirectory
from aotgaudi.digest import Digest
from aotgaudi.document import load_foreign_object
from aotgaudi.errors import CorruptError, SpecError
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.machine import available_cores
from aotgaudi.runtime.memory import new_pages

WeightsMemory = Literal["copy", "map"]
"""Where weights are: in private memory ("copy"), or mapped from the files ("map"), which must then never change."""

DTYPES: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    | {
        f"{kind}{bits}": f"{name}{bits}"
        for kind, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    }
    | {"BOOL": "bool"}
)
"""Safetensors' names -> torch's."""
_ITEM_BYTES = {"BOOL": 1} | {name: int(name.lstrip("BFIU")) // 8 for name in DTYPES if name != "BOOL"}
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})

_CHUNK_BYTES = 8 << 20
"""Large, because after each piece a thread waits for the interpreter, which is busy importing torch."""
_ALIGNMENT = 64
_MAX_THREADS = 8
_MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor: torch's name of its dtype, its shape, and its bytes (row-major, little-endian)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass
class ShardReader:
    """Reads the weights of a model by name. One thread may `prefetch`, and another `take` when that is done."""

    model: ModelDirectory
    memory: WeightsMemory = "copy"
    _ready: dict[str, StoredTensor] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def prefetch(self, specs: Iterable[TensorSpec], passing: Collection[str] = ()) -> None:
        """Reads `specs` ahead of `take`. Raises as `take` does, and AotGaudiError after `stop`."""
        self._ready |= self._read({spec.name: spec for spec in specs}, passing)

    def take(self, specs: Iterable[TensorSpec], passing: Collection[str] = ()) -> dict[str, StoredTensor]:
        """Returns the tensors by name, and keeps no reference to them.

        Tensors in `passing` are needed only for a short time, so each gets separate memory.

        Raises:
            SpecError: a file is not a valid safetensors file, or a tensor is missing, has another shape, or has a dtype that
                cannot be converted. Names the file and the tensor.
            CorruptError, UntrustedError: as `ModelDirectory`.
        """
        wanted = {spec.name: spec for spec in specs}
        found = {name: self._ready.pop(name) for name in wanted if name in self._ready}
        rest = {name: spec for name, spec in wanted.items() if name not in found}
        return {**found, **(self._read(rest, passing) if rest else {})}

    def stop(self) -> None:
        """Makes a `prefetch` on another thread end soon."""
        self._stopped.set()

    def _read(self, wanted: Mapping[str, TensorSpec], passing: Collection[str]) -> dict[str, StoredTensor]:
        names = self.model.weight_files(wanted)
        found: dict[str, StoredTensor] = {}
        with ThreadPoolExecutor(max(1, min(_MAX_THREADS, available_cores(), len(names)))) as pool:
            for tensors in pool.map(lambda name: self._read_file(name, wanted, passing), names):
                found |= tensors
        missing = sorted(wanted.keys() - found.keys())
        if missing:
            problem = f"holds no tensor {missing[0]!r} ({len(missing)} missing in all)"
            raise SpecError(str(self.model.path), problem, WEIGHTS_REMEDY)
        return found

    def _read_file(
        self, name: str, wanted: Mapping[str, TensorSpec], passing: Collection[str]
    ) -> dict[str, StoredTensor]:
        expected = self.model.expected(name)
        where = str(self.model.path / name)
        try:
            with self.model.open(name, expected) as raw:
                file = _File(raw, where, self._stopped, hashes=expected is not None)
                rows = _renamed(list(_rows(file)), wanted)
                for row in rows:
                    if row.name in wanted:
                        row.require(wanted[row.name], where)
                maps = self.memory == "map"
                found = _mapped(file, rows, wanted) if maps else _copied(file, rows, wanted, passing)
                if expected is not None:
                    self.model.compare(name, file.digest(), expected)
        except FileNotFoundError as error:
            if expected is not None:
                raise CorruptError(f"{where} is missing, and the bundle binds it") from error
            raise SpecError(where, "cannot be read as safetensors: no such file", WEIGHTS_REMEDY) from error
        except SpecError:
            if expected is not None:  # Report first if it is not the bound file at all.
                self.model.compare(name, self.model.digest(name, expected), expected)
            raise
        return found


@dataclass(frozen=True, slots=True)
class _Row:
    """One tensor of a header. `begin` and `end` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def require(self, spec: TensorSpec, where: str) -> None:
        """Raises SpecError unless the tensor has the shape of `spec`, and its dtype or one that can be converted to it."""
        remedy = "use the model that the bundle was built for"
        if self.shape != spec.shape:
            problem = f"{self.name} has shape {list(self.shape)}, the bundle needs {list(spec.shape)}"
            raise SpecError(where, problem, remedy)
        dtype = DTYPES.get(self.dtype, "")
        if dtype != spec.dtype and not any({dtype, spec.dtype} <= kind for kind in (_FLOATS, _INTEGERS)):
            raise SpecError(
                where, f"{self.name} has dtype {self.dtype:.20}, the bundle needs {spec.dtype}", remedy
            )


class _File:
    """Reads a file from start to end, and hashes it on the way if `hashes`."""

    def __init__(self, raw: FileIO, where: str, stopped: threading.Event, *, hashes: bool) -> None:
        self.raw, self.where, self.at = raw, where, 0
        self.size_bytes = os.fstat(raw.fileno()).st_size
        self._stopped, self._state = stopped, hashlib.sha256() if hashes else None

    def bad(self, problem: str) -> SpecError:
        return SpecError(self.where, f"cannot be read as safetensors: {problem}")

    def fill(self, view: memoryview) -> None:
        """Fills `view` with the next bytes."""
        while view:
            if self._stopped.is_set():
                raise self.bad("stopped")
            count = self.raw.readinto(view[:_CHUNK_BYTES])
            if not count:
                raise self.bad("it ends before its tensors do")
            if self._state is not None:
                self._state.update(view[:count])
            self.at, view = self.at + count, view[count:]

    def fill_at(self, offset: int, view: memoryview) -> None:
        """Fills `view` with the bytes from `offset` on."""
        if view:
            self.pass_to(offset)
            self.fill(view)

    def pass_to(self, offset: int) -> None:
        """Moves to `offset`. Reads the bytes in between only if they must be hashed."""
        if self._state is None:
            self.at = self.raw.seek(offset)
            return
        scratch = memoryview(bytearray(min(_CHUNK_BYTES, max(0, offset - self.at))))
        while self.at < offset:
            self.fill(scratch[: offset - self.at])

    def digest(self) -> Digest:
        """Reads the rest of the file, and returns the digest of the whole file."""
        assert self._state is not None
        self.pass_to(self.size_bytes)
        if self.raw.read(1):
            raise self.bad("it grows while it is read")
        return Digest(self._state.hexdigest(), self.at)


def _rows(file: _File) -> Iterator[_Row]:
    """Reads the header, and yields its tensors in file order."""
    head = bytearray(8)
    if file.size_bytes < len(head):
        raise file.bad("it is too short")
    file.fill(memoryview(head))
    length = int.from_bytes(head, "little")
    if length > min(MAX_TEXT_BYTES, file.size_bytes - len(head)):
        raise file.bad(f"its header would have {length} bytes")
    header = bytearray(length)
    file.fill(memoryview(header))
    start = end = len(head) + length
    rows = [_row(name, value, start, file) for name, value in _tensors(bytes(header), file)]
    for row in sorted(rows, key=lambda row: (row.begin, row.end)):
        if row.begin != end:
            raise file.bad(f"{row.name!r:.100} overlaps another tensor, or leaves a gap")
        end = row.end
        yield row
    if end != file.size_bytes:
        raise file.bad(f"it has {file.size_bytes} bytes, its tensors need {end}")


def _renamed(rows: list[_Row], wanted: Mapping[str, TensorSpec]) -> list[_Row]:
    """Returns the rows under the wanted names. Checkpoints of models without a head may leave out the names' prefix."""
    own = {row.name for row in rows}

    def name(row: _Row) -> str:
        whole = BASE_PREFIX + row.name
        return whole if row.name not in wanted and whole in wanted and whole not in own else row.name

    return [replace(row, name=name(row)) for row in rows]


def _tensors(header: bytes, file: _File) -> Iterable[tuple[str, Any]]:
    values = load_foreign_object(header, file.where)
    values.pop("__metadata__", None)
    return values.items()


def _row(name: str, value: object, start: int, file: _File) -> _Row:
    if not (isinstance(value, dict) and isinstance(value.get("dtype"), str)):
        raise file.bad(f"{name!r:.100} is no tensor")
    dtype, shape, offsets = value["dtype"], _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise file.bad(f"{name!r:.100} lacks a shape or data_offsets")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes < 0 or (dtype in _ITEM_BYTES and num_bytes != math.prod(shape) * _ITEM_BYTES[dtype]):
        raise file.bad(f"{name!r:.100} has {num_bytes} bytes, which is not what its shape and dtype need")
    return _Row(name, dtype, shape, start + offsets[0], start + offsets[1])


def _sizes(value: object) -> tuple[int, ...] | None:
    """Returns `value` as sizes, or None if it is not a list of sizes."""
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return None
    return tuple(value) if all(type(item) is int and 0 <= item < 1 << 63 for item in value) else None


def _copied(
    file: _File, rows: Iterable[_Row], wanted: Mapping[str, TensorSpec], passing: Collection[str]
) -> dict[str, StoredTensor]:
    """Copies the wanted tensors. Those used as stored share one allocation. Each of the others has its own, to be freed."""
    mine = [
        (row, DTYPES[row.dtype] == wanted[row.name].dtype and row.name not in passing)
        for row in rows
        if row.name in wanted
    ]
    shared = new_pages(sum(_aligned_bytes(row) for row, is_kept in mine if is_kept))
    found: dict[str, StoredTensor] = {}
    # Neighbours are read at once. Of such a run, we track its place in the file, its length, and its end in `shared`.
    run_at = run_bytes = used = 0
    for row, is_kept in mine:
        num_bytes = row.end - row.begin
        if not is_kept or row.begin != run_at + run_bytes or used % _ALIGNMENT:
            file.fill_at(run_at, shared[used - run_bytes : used])
            run_at, run_bytes, used = row.begin, 0, -(-used // _ALIGNMENT) * _ALIGNMENT
        data = shared[used : used + num_bytes] if is_kept else new_pages(num_bytes)
        if is_kept:
            run_bytes, used = run_bytes + num_bytes, used + num_bytes
        else:
            file.fill_at(row.begin, data)
            run_at = row.end
        found[row.name] = StoredTensor(DTYPES[row.dtype], row.shape, data)
    file.fill_at(run_at, shared[used - run_bytes : used])
    return found


def _aligned_bytes(row: _Row) -> int:
    """Returns the tensor's size, rounded up to a cache line."""
    return -(-(row.end - row.begin) // _ALIGNMENT) * _ALIGNMENT


def _mapped(file: _File, rows: Iterable[_Row], wanted: Mapping[str, TensorSpec]) -> dict[str, StoredTensor]:
    """Maps the file and returns the wanted tensors. Pages that are written to become private; the others stay the file's."""
    pages = memoryview(mmap.mmap(file.raw.fileno(), file.size_bytes, access=mmap.ACCESS_COPY))
    return {
        row.name: StoredTensor(DTYPES[row.dtype], row.shape, pages[row.begin : row.end])
        for row in rows
        if row.name in wanted
    }
