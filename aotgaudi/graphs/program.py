"""Programs: how one entry runs, as an ordered list of calls of compiled units. JSON; imports no torch.

A program runs its calls in order. Every argument of a call is a *binding*, written ``<source>:<name>``:

===============  ====================================================================================
source           what it names
===============  ====================================================================================
``weight``       a parameter or persistent buffer of the checkpoint, by its safetensors name; several
                 names with ``+`` between them: all of these, concatenated along the first dimension
``int8``         the same, rounded to 8 bits (`aotgaudi.graphs.quantization`): integers of their shape
``int8_scales``  the scales of these integers, float32, one per row
``const``        a tensor that follows from the model's configuration alone (``inv_freq``), in `constants`
``kv``           a cache of a layer, ``<layer>`` or ``<layer>.<part>``: ``[planes, num_blocks + 1, heads, rows a
                 block, width]`` (`aotgaudi.spec.cache_rows`). With two planes, keys and values
``step``         an input of the step (see `inputs`)
``tmp``          an output of an earlier call
===============  ====================================================================================

Versions: 1 (first), 2 (any number of blocks), 3 (concatenated weights), 4 (weights in 8 bits), 5 (caches of any planes and
rows, several a layer).

A unit may write to its ``kv`` arguments; nothing else is written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Literal, Union

from pydantic import Field

from aotgaudi.digest import canonical_json
from aotgaudi.document import Value
from aotgaudi.spec.quantization import WeightsDtype

PROGRAM_SCHEMA: Literal["aotgaudi.program/5"] = "aotgaudi.program/5"

ANY_NUM_BLOCKS: Literal["num_blocks + 1"] = "num_blocks + 1"
"""Stands for the number of blocks where a program leaves it to the server."""


WEIGHT = "weight"
"""The source that names weights of the checkpoint as they are stored."""

PACKED_SOURCES: Mapping[WeightsDtype, tuple[str, ...]] = MappingProxyType({"int8": ("int8", "int8_scales")})
"""For each quantization, the sources that name what it makes of weights, in the order of its operator's arguments."""

_AND = "+"
_OF_WEIGHTS = frozenset((WEIGHT, *chain.from_iterable(PACKED_SOURCES.values())))


def join_bindings(bindings: Iterable[str]) -> str:
    """Returns the binding of the concatenated weights of `bindings`, which all have one source."""
    listed = list(bindings)
    source = listed[0].partition(":")[0]
    return rebound(source, (name for binding in listed for name in weight_names(binding)))


def rebound(source: str, names: Iterable[str]) -> str:
    """Returns the binding of `source` for these weights, concatenated."""
    return f"{source}:{_AND.join(names)}"


def weight_names(binding: str) -> tuple[str, ...]:
    """Returns the names of a binding's weights, in order; empty if the binding is of another kind."""
    source, _, names = binding.partition(":")
    return tuple(names.split(_AND)) if source in _OF_WEIGHTS else ()


class TensorSpec(Value):
    """Name, shape and dtype (``float32``, ``bfloat16``, ``int64``, ...) of a contiguous tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class CacheSpec(Value):
    """A cache, named ``<layer>`` or ``<layer>.<part>``. The server chooses the number of blocks if it is open."""

    name: str
    shape: tuple[Union[int, Literal["num_blocks + 1"]], ...]
    dtype: str

    def sizes(self, num_blocks: int) -> tuple[int, ...]:
        """Returns the shape in a server with `num_blocks` blocks, not counting the padding block."""
        return tuple(num_blocks + 1 if size == ANY_NUM_BLOCKS else int(size) for size in self.shape)


class Call(Value):
    """One call: the unit's key (sha256 hex), bindings of its inputs, names for its outputs."""

    unit: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Program(Value):
    """How one entry runs. `inputs` are the step's tensors, `outputs` are ``tmp`` names.

    `caches` are those of all layers, in order. Every program of a bundle names the same caches or none.
    `constants` is the digest of a safetensors blob with the tensors of ``const`` bindings, or None.
    """

    schema_: Literal[
        "aotgaudi.program/1",
        "aotgaudi.program/2",
        "aotgaudi.program/3",
        "aotgaudi.program/4",
        "aotgaudi.program/5",
    ] = Field(default=PROGRAM_SCHEMA, alias="schema")
    inputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    caches: tuple[CacheSpec, ...]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]
    constants: str | None = None

    def dumps(self) -> bytes:
        """Returns the canonical JSON."""
        return canonical_json(self.model_dump(mode="json", by_alias=True))

    def unit_keys(self) -> tuple[str, ...]:
        """The distinct units called, in order of first call."""
        return tuple(dict.fromkeys(call.unit for call in self.calls))
