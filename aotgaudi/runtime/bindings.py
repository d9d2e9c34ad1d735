"""Binds weights in the form that units take: concatenated, quantized, or in a layout of the device. Imports no torch.

A program binds weights by name (`aotgaudi.graphs.program`), and the receipt says in which layout a unit takes them. This
module combines both as ``weight:<names>@<layout>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aotgaudi.bundle.receipt import Receipt
from aotgaudi.graphs.program import Call, Program, weight_names

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
