"""The weights that programs bind: by which names, in which layout, and their bytes in safetensors files. Imports no torch.

A `WeightBinding` combines the names in a program (`aotgaudi.graphs.program`) with the layout in which its unit takes them,
from the receipt, as ``weight:<names>@<layout>``. A `ShardReader` reads tensors into private memory, and hashes the files if
a bundle binds them.

::

    file   = length header data           ; length: 8 bytes, little-endian; header: that many bytes of JSON
    header = {name: {"dtype": str, "shape": [int, ...], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}

(https://github.com/huggingface/safetensors#format.) The tensors cover the data from the first byte to the last, in any order
and without overlap. The safetensors library maps the file, so that overwriting it changes the results, or copies the whole
file, and needs torch or numpy to read a header (docs/adr/0010-bundle-and-trust.md). Here each wanted tensor gets pages of
its own, which are freed with it, and the others are hashed and dropped.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from aotgaudi.bundle.model_directory import MAX_TEXT_BYTES, WEIGHTS_REMEDY, ModelDirectory
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.digest import Digest
from aotgaudi.document import ForeignValue, first_problem, load_foreign_object
from aotgaudi.errors import CorruptError, SpecError
from aotgaudi.graphs.program import Call, Program, TensorSpec, weight_names
from aotgaudi.machine import in_threads
from aotgaudi.runtime.memory import new_pages

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
_BUFFER_BYTES = 1 << 20
"""Small tensors are read together, for the same reason."""
_LENGTH_BYTES = 8


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
    _ready: dict[str, StoredTensor] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def prefetch(self, specs: Iterable[TensorSpec]) -> None:
        """Reads `specs` ahead of `take`. Raises as `take` does, and AotGaudiError after `stop`."""
        self._ready |= self._read({spec.name: spec for spec in specs})

    def take(self, specs: Iterable[TensorSpec]) -> dict[str, StoredTensor]:
        """Returns the tensors by name, each in memory of its own, and keeps no reference to them.

        Raises:
            SpecError: a file is not a valid safetensors file, or a tensor is missing, has another shape, or has a dtype that
                cannot be converted. Names the file and the tensor.
            CorruptError, UntrustedError: as `ModelDirectory`.
        """
        wanted = {spec.name: spec for spec in specs}
        found = {name: self._ready.pop(name) for name in wanted if name in self._ready}
        rest = {name: spec for name, spec in wanted.items() if name not in found}
        return {**found, **(self._read(rest) if rest else {})}

    def stop(self) -> None:
        """Makes a `prefetch` on another thread end soon."""
        self._stopped.set()

    def _read(self, wanted: Mapping[str, TensorSpec]) -> dict[str, StoredTensor]:
        names = self.model.weight_files(wanted)
        found: dict[str, StoredTensor] = {}
        for tensors in in_threads(lambda name: self._read_file(name, wanted), names):
            found |= tensors
        missing = sorted(wanted.keys() - found.keys())
        if missing:
            problem = f"holds no tensor {missing[0]!r} ({len(missing)} missing in all)"
            raise SpecError(str(self.model.path), problem, WEIGHTS_REMEDY)
        return found

    def _read_file(self, name: str, wanted: Mapping[str, TensorSpec]) -> dict[str, StoredTensor]:
        expected = self.model.expected(name)
        where = str(self.model.path / name)
        try:
            with self.model.open(name, expected) as raw:
                source = _Source(raw, where, self._stopped, hashes=expected is not None)
                file = io.BufferedReader(source, _BUFFER_BYTES)
                found = dict(_copied(file, _rows(file, os.fstat(raw.fileno()).st_size, where), wanted, where))
                if expected is not None:
                    file.read(1)  # A file that has grown is another one.
                    self.model.compare(name, source.digest(), expected)
        except FileNotFoundError as error:
            if expected is not None:
                raise CorruptError(f"{where} is missing, and the bundle binds it") from error
            raise SpecError(where, "cannot be read as safetensors: no such file", WEIGHTS_REMEDY) from error
        except SpecError:
            if expected is not None:  # Report first if it is not the bound file at all.
                self.model.compare(name, self.model.digest(name, expected), expected)
            raise
        return found


class _Source(io.RawIOBase):
    """Reads a file in large pieces. With `hashes` it hashes what it reads, and cannot seek. Fails after `stopped`."""

    def __init__(self, raw: io.FileIO, where: str, stopped: threading.Event, *, hashes: bool) -> None:
        self._raw, self._where, self._stopped, self._hashes = raw, where, stopped, hashes
        self._state, self._num_bytes = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self._hashes

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._raw.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        if self._stopped.is_set():
            raise _bad(self._where, "stopped")
        view = memoryview(buffer)[:_CHUNK_BYTES]
        count = self._raw.readinto(view)
        if self._hashes:
            self._state.update(view[:count])
            self._num_bytes += count
        return count

    def digest(self) -> Digest:
        """Returns the digest of what was read."""
        return Digest(self._state.hexdigest(), self._num_bytes)


def _bad(where: str, problem: str) -> SpecError:
    return SpecError(where, f"cannot be read as safetensors: {problem}")


_Size = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Row(ForeignValue):
    """One tensor of a header."""

    dtype: str
    shape: Annotated[list[_Size], Field(max_length=64)]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]

    def require(self, spec: TensorSpec, where: str) -> None:
        """Raises SpecError unless the tensor has the shape of `spec`, and its dtype or one that can be converted to it."""
        remedy = "use the model that the bundle was built for"
        if tuple(self.shape) != spec.shape:
            problem = f"{spec.name} has shape {self.shape}, the bundle needs {list(spec.shape)}"
            raise SpecError(where, problem, remedy)
        dtype = DTYPES.get(self.dtype, "")
        if dtype != spec.dtype and not any({dtype, spec.dtype} <= kind for kind in (_FLOATS, _INTEGERS)):
            raise SpecError(
                where, f"{spec.name} has dtype {self.dtype:.20}, the bundle needs {spec.dtype}", remedy
            )


_ROWS = TypeAdapter(dict[str, _Row])


def _rows(file: io.BufferedIOBase, size_bytes: int, where: str) -> dict[str, _Row]:
    """Reads the header, and returns its tensors in file order."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > min(MAX_TEXT_BYTES, size_bytes - _LENGTH_BYTES):
        raise _bad(where, f"its header would have {length} bytes")
    values = load_foreign_object(file.read(length), where)
    values.pop("__metadata__", None)
    try:
        rows = _ROWS.validate_python(values)
    except ValidationError as error:
        raise _bad(where, first_problem(error)) from error
    end = 0
    ordered = dict(sorted(rows.items(), key=lambda item: item[1].data_offsets))
    for name, row in ordered.items():
        if row.data_offsets[0] != end or row.num_bytes < 0:
            raise _bad(where, f"{name!r:.100} overlaps another tensor, or leaves a gap")
        if row.dtype in _ITEM_BYTES and row.num_bytes != math.prod(row.shape) * _ITEM_BYTES[row.dtype]:
            problem = f"{row.num_bytes} bytes, which is not what its shape and dtype need"
            raise _bad(where, f"{name!r:.100} has {problem}")
        end = row.data_offsets[1]
    if _LENGTH_BYTES + length + end != size_bytes:
        raise _bad(where, f"it has {size_bytes} bytes, its tensors need {_LENGTH_BYTES + length + end}")
    return ordered


def _copied(
    file: io.BufferedIOBase, rows: Mapping[str, _Row], wanted: Mapping[str, TensorSpec], where: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the wanted tensors by name, in new memory. Raises SpecError."""
    for name, row in rows.items():
        if name in wanted:
            row.require(wanted[name], where)
    for name, row in rows.items():
        spec = wanted.get(name)
        if spec is None:
            _skip(file, row.num_bytes)
            continue
        data = new_pages(row.num_bytes)
        if file.readinto(data) < row.num_bytes:
            raise _bad(where, "it ends before its tensors do")
        yield spec.name, StoredTensor(DTYPES[row.dtype], spec.shape, data)


def _skip(file: io.BufferedIOBase, num_bytes: int) -> None:
    """Passes bytes by. Reads them only if they must be hashed."""
    if file.seekable():
        file.seek(num_bytes, os.SEEK_CUR)
        return
    while num_bytes and (piece := file.read(min(_BUFFER_BYTES, num_bytes))):
        num_bytes -= len(piece)


# Bindings

_AT = "@"


@dataclass(frozen=True, slots=True)
class WeightBinding:
    """Weights of a model directory, to be concatenated in this order, and their layout (None: as stored).

    `source` comes from the program. It names the weights themselves, or a packed tensor of a quantization.
    """

    text: str
    source: str
    names: tuple[str, ...]
    layout: str | None

    @classmethod
    def parse(cls, text: str) -> WeightBinding:
        """Parses a binding of a placed program."""
        stored, at, layout = text.rpartition(_AT)
        stored = stored if at else text
        return cls(text, stored.partition(":")[0], weight_names(stored), layout if at else None)


def placed(program: Program, receipt: Receipt) -> Program:
    """Returns `program` with its weights bound in the layouts that its units take.

    Raises KeyError for a unit that the receipt lacks.
    """
    return program.model_copy(update={"calls": tuple(_placed(call, receipt) for call in program.calls)})


def _placed(call: Call, receipt: Receipt) -> Call:
    layouts = receipt.units[call.unit].layouts
    if not layouts:
        return call
    inputs = [
        f"{binding}{_AT}{layouts[str(number)]}" if str(number) in layouts else binding
        for number, binding in enumerate(call.inputs)
    ]
    return call.model_copy(update={"inputs": tuple(inputs)})


def weight_bindings(programs: Iterable[Program]) -> Iterator[WeightBinding]:
    """Yields each binding of weights in placed programs, without repetitions."""
    texts = (text for program in programs for call in program.calls for text in call.inputs)
    for text in dict.fromkeys(texts):
        if weight_names(text):
            yield WeightBinding.parse(text)
