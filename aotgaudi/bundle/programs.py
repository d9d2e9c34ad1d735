"""Parses the programs of a bundle, and checks what they need and whether they can run.

`aotgaudi verify` and `aotgaudi serve` both check programs here before anything is loaded, so they agree. A program can run
if every binding names something that exists when it is needed, if all calls of a unit have the same arity, and if its
inputs, outputs and caches are those that the server gives to its entries.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import count, repeat
from typing import TYPE_CHECKING

import pydantic

from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.digest import Digest
from aotgaudi.document import first_problem
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, MhcEntry, PromptEntry, SamplerEntry
from aotgaudi.errors import ManifestError, SpecError
from aotgaudi.graphs.dialect import dialect_of
from aotgaudi.graphs.program import ANY_NUM_BLOCKS, WEIGHT, CacheSpec, Call, Program, TensorSpec, weight_names
from aotgaudi.graphs.step_inputs import MaskKind, decode_inputs, hpu_inputs, prompt_inputs, sampler_inputs
from aotgaudi.manifest.enumerate import MHC_SUBLAYERS
from aotgaudi.manifest.memory import tensor_bytes, tensors_bytes
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.cache_rows import Compression

if TYPE_CHECKING:
    from aotgaudi.bundle.receipt import Receipt

_DTYPES = frozenset(
    {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
)
_CACHE_NAME = re.compile(r"[0-9]{1,9}(\.[a-z_]{1,40})?", re.ASCII)
_SAFETENSORS_LENGTH_BYTES = 8


def load_program(data: bytes, digest: Digest) -> Program:
    """Parses the JSON of a program. Raises ManifestError, which names its digest."""
    try:
        return Program.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise ManifestError(f"program {digest}: {first_problem(error)}") from error


def program_objects(program: Program, receipt: Receipt) -> tuple[Digest, ...]:
    """Returns the objects that `program` needs, without repetitions: its constants, its units' files, the receipt's recipes.

    Raises ManifestError if the receipt lacks one of its units, or if a digest is malformed.
    """
    try:
        digests = [] if program.constants is None else [Digest.parse(program.constants)]
    except ValueError as error:
        raise ManifestError(f"the program's constants: {error}") from error
    for key in program.unit_keys():
        unit = receipt.units.get(key)
        if unit is None:
            raise ManifestError(f"unit {key:.12}... of the program is not in the receipt")
        digests.extend(unit.artifact.values())
    digests.extend(receipt.recipes.values())
    return tuple(dict.fromkeys(digests))


class ProgramChecks:
    """Checks the programs of one bundle. They share units and caches, so arities and shapes must agree in all of them."""

    def __init__(self, spec: BuildSpec) -> None:
        self._spec, self._is_flat = spec, dialect_of(spec).name == "hpu"
        self._arities: dict[str, tuple[int, int]] = {}
        self._caches: tuple[CacheSpec, ...] = ()

    def problem(self, program: Program) -> str | None:
        """Returns what keeps `program` from running on any server, or None. `verify_bundle` checks `constants_of`."""
        return next(self._problems(program), None)

    def entry_problem(self, program: Program, entry: Entry) -> str | None:
        """Returns what keeps a sound program from running `entry`, or None."""
        wanted, num_outputs = _interface(entry, program, self._spec)
        if num_outputs is not None and len(program.outputs) != num_outputs:
            return f"has {len(program.outputs)} outputs, {entry} has {num_outputs}"
        for spec in program.inputs if wanted is not None else ():
            given = wanted.get(spec.name) if wanted else None
            if given is None:
                return f"has the input {spec.name!r:.80}, which {entry} does not give"
            if spec != given:
                return (
                    f"has the input {spec.name!r:.80} of {spec.dtype:.20} {list(spec.shape)!s:.80},"
                    f" {entry} gives {given.dtype} {list(given.shape)}"
                )
        return None

    def _problems(self, program: Program) -> Iterator[str]:
        yield from _tensor_problems("input", program.inputs)
        yield from _tensor_problems("weight", program.weights)
        yield from _tensor_problems("cache", program.caches)
        yield from self._cache_problems(program.caches)
        known = _given_bindings(program)
        weights = {spec.name for spec in program.weights}
        for number, call in enumerate(program.calls):
            yield from _call_problems(
                number, call, known, weights, has_constants=program.constants is not None
            )
            yield from self._arity_problems(number, call)
            known.update(f"tmp:{name}" for name in call.outputs)
        for name in program.outputs:
            if f"tmp:{name}" not in known:
                yield f"its output {name!r:.80} is no output of a call"

    def _arity_problems(self, number: int, call: Call) -> Iterator[str]:
        arity = len(call.inputs), len(call.outputs)
        other = self._arities.setdefault(call.unit, arity)
        if arity != other:
            yield (
                f"call {number} gives unit {call.unit:.12}... {arity[0]} inputs and {arity[1]} outputs,"
                f" another call gives it {other[0]} and {other[1]}"
            )

    def _cache_problems(self, caches: tuple[CacheSpec, ...]) -> Iterator[str]:
        limits = self._spec.limits
        have_tokens = {_layer_of(cache) for cache in caches if cache.shape[3:4] == (limits.block_size,)}
        for cache in caches:
            shape = cache.shape
            if self._is_flat:
                num_slots = (limits.num_blocks + 1) * limits.block_size
                is_sound, wanted = len(shape) == 3 and shape[0] == num_slots, f"[{num_slots}, heads, width]"
            else:
                is_sound = len(shape) == 5 and shape[1] in (ANY_NUM_BLOCKS, limits.num_blocks + 1)
                is_sound = is_sound and _takes_slots(cache, have_tokens, limits.block_size)
                wanted = f"[planes, {ANY_NUM_BLOCKS!r}, heads, {limits.block_size} rows, width]"
            if not is_sound:
                yield f"its cache {cache.name!r:.80} has shape {list(shape)!s:.80}, should be {wanted}"
            if not _CACHE_NAME.fullmatch(cache.name):
                yield f"it has a cache {cache.name!r:.80}, which is named neither for a layer nor for a part of one"
        if caches:
            self._caches = self._caches or caches
            if caches != self._caches:
                yield "it names other caches than another program of the bundle"


def _layer_of(cache: CacheSpec) -> str:
    return cache.name.partition(".")[0]


def _takes_slots(cache: CacheSpec, have_tokens: Container[str], block_size: int) -> bool:
    """Returns whether a layer's main cache has a row for each token of a block.

    It may have more rows if another cache of the layer has exactly one for each token.
    """
    if "." in cache.name:
        return True
    rows = cache.shape[3]
    return isinstance(rows, int) and rows >= block_size and _layer_of(cache) in have_tokens


def split_problems(spec: BuildSpec, programs: Mapping[Entry, Program]) -> Iterator[tuple[Entry, str]]:
    """Yields each step that does not call the hyper-connection unit of its class in all layers, and what is wrong.

    The unit of a class is the one that its ``mhc`` entries call. Classes without such an entry in `programs` are not
    checked.
    """
    splits = StepSplits.of(spec)
    if splits is None:
        return
    units: dict[int, set[str]] = {}
    for entry, program in programs.items():
        if isinstance(entry, MhcEntry):
            units.setdefault(entry.n_splits, set()).update(program.unit_keys())
    num_calls = len(MHC_SUBLAYERS) * spec.model.num_layers
    for entry, program in programs.items():
        n_splits = splits.of_entry(entry) if isinstance(entry, (PromptEntry, DecodeEntry)) else None
        if n_splits not in units:
            continue
        where = f"{entry} has the hyper-connections of {n_splits} partial sums"
        others = {unit: n for n, keys in units.items() for unit in keys - units[n_splits]}
        called = [call.unit for call in program.calls]
        wrong = next((number for number, unit in enumerate(called) if unit in others), None)
        num_own = sum(unit in units[n_splits] for unit in called)
        if wrong is not None:
            yield entry, f"{where}; call {wrong} is of {others[called[wrong]]}"
        elif num_own != num_calls or len(units[n_splits]) > 1:
            yield entry, f"{where}; it calls the unit of its class {num_own} times, should be {num_calls}"


def weights_bytes(programs: Iterable[Program], receipt: Receipt) -> int:
    """Returns the most bytes that weights take at a time: as `programs` read them, or in the forms in which units take them.

    A weight that units take in two forms is there twice (`aotgaudi.runtime.load.bind_weights`).
    """
    weights: dict[str, TensorSpec] = {}
    forms: set[tuple[str, str | None]] = set()
    for program in programs:
        weights.update((spec.name, spec) for spec in program.weights)
        for call in program.calls:
            layouts = receipt.units[call.unit].layouts
            of_inputs = map(layouts.get, map(str, count())) if layouts else repeat(None)
            forms.update(zip(call.inputs, of_inputs, strict=False))
    bound = (
        _bound_bytes(text.partition(":")[0], weights[name])
        for text, _ in forms
        for name in weight_names(text)
    )
    return max(tensors_bytes(weights.values()), sum(bound))


def _bound_bytes(source: str, weight: TensorSpec) -> int:
    """Returns the bytes of a weight as bindings of `source` name it (`aotgaudi.graphs.program`)."""
    if source == WEIGHT:
        return tensor_bytes(weight.shape, weight.dtype)
    return tensor_bytes(weight.shape[:1], "float32") if source == "int8_scales" else math.prod(weight.shape)


def constants_of(program: Program) -> frozenset[str]:
    """Returns the names of the constants that a program binds."""
    bindings = (name for call in program.calls for name in call.inputs)
    return frozenset(name.removeprefix("const:") for name in bindings if name.startswith("const:"))


def tensor_names(data: bytes) -> frozenset[str]:
    """Returns the names in a safetensors object's header; empty if the header is malformed or its data has another size."""
    size = int.from_bytes(data[:_SAFETENSORS_LENGTH_BYTES], "little")
    start = _SAFETENSORS_LENGTH_BYTES + size
    try:
        header = json.loads(data[_SAFETENSORS_LENGTH_BYTES:start])
        header.pop("__metadata__", None)
        spans = sorted(tuple(value["data_offsets"]) for value in header.values())
        borders = [0, *(end for _, end in spans)]
        is_whole = [begin for begin, _ in spans] == borders[:-1] and start + borders[-1] == len(data)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return frozenset()
    return frozenset(header) if is_whole else frozenset()


def _tensor_problems(kind: str, specs: Iterable[TensorSpec | CacheSpec]) -> Iterator[str]:
    seen: dict[str, TensorSpec | CacheSpec] = {}
    for spec in specs:
        first = seen.setdefault(spec.name, spec)
        # Two units may read the same (tied) weight, such as embedding and head.
        is_tied = kind == "weight" and first == spec
        if first is not spec and not is_tied:
            yield f"it lists the {kind} {spec.name!r:.80} twice"
        if spec.dtype not in _DTYPES:
            yield f"its {kind} {spec.name!r:.80} has the dtype {spec.dtype!r:.40}"
        if any(isinstance(size, int) and size < 0 for size in spec.shape):
            yield f"its {kind} {spec.name!r:.80} has shape {list(spec.shape)!s:.80}"


def _given_bindings(program: Program) -> set[str]:
    """Returns what a program's calls may bind from the start, without weights and constants."""
    return {
        *(f"step:{spec.name}" for spec in program.inputs),
        *(f"kv:{spec.name}" for spec in program.caches),
    }


def _call_problems(
    number: int, call: Call, known: set[str], weights: set[str], *, has_constants: bool
) -> Iterator[str]:
    for binding in call.inputs:
        names = weight_names(binding)
        is_known = weights.issuperset(names) if names else binding in known
        if not is_known and not (has_constants and binding.startswith("const:")):
            yield f"call {number} binds {binding!r:.80}, which is not there before it"
    outputs = [f"tmp:{name}" for name in call.outputs]
    if len(set(outputs)) < len(outputs) or not known.isdisjoint(outputs):
        yield f"call {number} gives an output a name that is taken"


def _interface(
    entry: Entry, program: Program, spec: BuildSpec
) -> tuple[Mapping[str, TensorSpec] | None, int | None]:
    """Returns the inputs that a server gives to `entry`, and the number of outputs that it takes. None means unknown."""
    block_size, dialect = spec.limits.block_size, dialect_of(spec)
    kinds = [kind for kind in (MaskKind.of(given.name) for given in program.inputs) if kind]
    windows = [kind.window for kind in kinds if kind.every is None]
    compressions = _compressions(program, kinds, block_size)
    inputs: tuple[TensorSpec, ...]
    if isinstance(entry, (PromptEntry, DecodeEntry)) and dialect.name == "hpu":
        inputs, num_outputs = hpu_inputs(entry, dialect), 1
    elif isinstance(entry, PromptEntry):
        inputs, num_outputs = prompt_inputs(entry, block_size, windows, compressions), 1
    elif isinstance(entry, DecodeEntry):
        inputs, num_outputs = decode_inputs(entry, block_size, windows, compressions), 1
    elif isinstance(entry, DefragEntry):
        names, shape = ("sources", "destinations"), (entry.padded_swaps,)
        inputs, num_outputs = tuple(TensorSpec(name=name, shape=shape, dtype="int64") for name in names), 0
    elif isinstance(entry, SamplerEntry):
        num_outputs = 4 if entry.signature.logprobs else 1
        try:
            vocab_size = spec.model.vocab_size
        except SpecError:
            return None, num_outputs
        inputs = sampler_inputs(entry.batch_size, entry.signature, vocab_size, spec.model.dtype, dialect)
    else:
        return None, None
    return {given.name: given for given in inputs}, num_outputs


def _compressions(program: Program, kinds: Iterable[MaskKind], block_size: int) -> tuple[Compression, ...]:
    """Returns how layers compress, from the program's masks and windows. The caches' rows decide what an indexer is for."""
    shapes = {given.name: given.shape for given in program.inputs}
    found = (
        (kind.every, kind.window, shapes.get(f"windows_r{kind.every}", ()))
        for kind in kinds
        if kind.every and block_size % kind.every == 0
    )
    return tuple(
        Compression(every, shape[2], is_indexed=False, window=window)
        for every, window, shape in found
        if window and len(shape) == 3 and shape[2] > 0
    )
