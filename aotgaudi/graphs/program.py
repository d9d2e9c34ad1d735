"""Programs: how one entry runs, as an ordered list of calls of compiled units. JSON; imports no torch.

A program is a loop over calls. Every argument of a call is a *binding*, written ``<source>:<name>``:

==========  =========================================================================================
source      what it names
==========  =========================================================================================
``weight``  a parameter or persistent buffer of the checkpoint, by its safetensors name; several names
            with ``+`` between them: all of these, joined along their first dimension
``const``   a tensor that follows from the model's configuration alone (``inv_freq``), in `constants`
``kv``      the KV cache of layer ``<name>`` (a number), ``[2, num_blocks + 1, kv_heads, block_size, head_dim]``
``step``    an input of the step (see `inputs`)
``tmp``     an output of an earlier call
==========  =========================================================================================

Versions: 1 (first), 2 (any number of blocks), 3 (joined weights).

A unit may write to its ``kv`` arguments; nothing else is written to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Union

from pydantic import Field

from aotgaudi.digest import canonical_json
from aotgaudi.document import Value

PROGRAM_SCHEMA: Literal["aotgaudi.program/3"] = "aotgaudi.program/3"

ANY_NUM_BLOCKS: Literal["num_blocks + 1"] = "num_blocks + 1"
"""Written in place of the number of blocks that a program leaves to the server."""


_WEIGHT, _AND = "weight:", "+"


def join_bindings(bindings: Iterable[str]) -> str:
    """Returns the binding of all weights that `bindings` name, joined."""
    return _WEIGHT + _AND.join(binding.removeprefix(_WEIGHT) for binding in bindings)


def weight_names(binding: str) -> tuple[str, ...]:
    """Returns the names of the weights that a binding names, in order; none where it is of another source."""
    return tuple(binding.removeprefix(_WEIGHT).split(_AND)) if binding.startswith(_WEIGHT) else ()


class TensorSpec(Value):
    """Name, shape and dtype (``float32``, ``bfloat16``, ``int64``, ...) of a contiguous tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class CacheSpec(Value):
    """One layer's KV cache, by the layer's number; its number of blocks is the server's, or fixed where it is a number."""

    name: str
    shape: tuple[Union[int, Literal["num_blocks + 1"]], ...]
    dtype: str

    def sizes(self, num_blocks: int) -> tuple[int, ...]:
        """Returns the shape in a server with `num_blocks` blocks besides the padding block."""
        return tuple(num_blocks + 1 if size == ANY_NUM_BLOCKS else size for size in self.shape)


class Call(Value):
    """One call: unit key (sha256 hex), bindings of its inputs, names that its outputs get."""

    unit: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Program(Value):
    """How one entry runs. `inputs` are the step's tensors, `outputs` are ``tmp`` names.

    `caches` are the KV caches by layer number; every program of a bundle names the same ones or none.
    `constants` is the digest of a safetensors blob with the tensors behind ``const`` bindings, or None.
    """

    schema_: Literal["aotgaudi.program/1", "aotgaudi.program/2", "aotgaudi.program/3"] = Field(
        default=PROGRAM_SCHEMA, alias="schema"
    )
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
