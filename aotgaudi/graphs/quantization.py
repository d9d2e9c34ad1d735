"""Quantizations: how weights of linear layers are stored in fewer bits, and what a product over them computes.

To add one, add a value to `QUANTIZATIONS` here, and the code of its operator (a lowering and a C++ template) to
``backends/inductor/quantized_linear.py``. Two formats list its names: the spec (``spec/quantization.py``) and the bindings
of programs (``graphs/program.py``). Everything else works from the value: which layers of a traced step take packed weights
(``graphs/quantized_linear.py``), what a server packs when it loads a model, and what a compiled unit is checked against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from aotgaudi.errors import SpecError
from aotgaudi.graphs.program import PACKED_SOURCES
from aotgaudi.spec.quantization import WeightsDtype

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Quantization(ABC):
    """One way to store a weight [out, in] as several packed tensors. Stateless.

    Attributes:
        name: What a spec calls it.
        tolerance: Error that compiled code may add to `reference`, relative to a row's largest result, on top of what the
            dtype allows.
    """

    name: WeightsDtype
    tolerance: float

    @property
    def sources(self) -> tuple[str, ...]:
        """The binding sources of the packed tensors, in the operator's order."""
        return PACKED_SOURCES[self.name]

    @property
    def operator(self) -> str:
        """The name of its operator in torch's namespace ``aotgaudi``: (source, *packed tensors, bias) -> product."""
        return f"{self.name}_linear"

    def packs(self, dtype: torch.dtype, *, is_choice: bool) -> bool:
        """Whether a linear layer takes its weight packed.

        Args:
            dtype: The weight's.
            is_choice: The layer's results choose something, as a router of experts does. Such layers are small, and a
                choice should not change.
        """
        return dtype in _FLOATS and not is_choice

    @abstractmethod
    def layouts(self, shape: Size) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of each packed tensor of a weight of `shape`."""

    @abstractmethod
    def pack(self, weight: Tensor, name: str) -> tuple[Tensor, ...]:
        """Returns the packed tensors of `weight`. Raises SpecError, naming `name`, for a weight that cannot be packed."""

    @abstractmethod
    def unpack(self, *packed: Tensor) -> Tensor:
        """Returns the weight that packed tensors stand for, in float32."""

    def reference(self, source: Tensor, *packed_and_bias: Tensor | None) -> Tensor:
        """Returns the product: source [..., in], packed tensors, bias or None -> [..., out] of the source's dtype.

        Computed in float32. Devices compile code of their own for it.
        """
        *packed, bias = packed_and_bias
        weight = self.unpack(*(tensor for tensor in packed if tensor is not None))
        return F.linear(source.float(), weight, None if bias is None else bias.float()).to(source.dtype)


class Int8(Quantization):
    """Integers of 8 bits with one float32 scale per output channel. Version 1 of the binding ``int8``.

    A row's scale is its largest magnitude / 127. Each integer is the one nearest to number / scale, ties to even, so all lie
    within -127 and 127. A row of zeros has the scale 1.
    """

    name: WeightsDtype = "int8"
    tolerance = 0.0
    largest = 127
    bytes_at_once = 1 << 19
    """Float32 bytes that packing needs besides the weight: they stay in a core's cache between two operations."""

    def layouts(self, shape: Size) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        """Integers [out, in], scales [out]."""
        return ((tuple(shape), torch.int8), (tuple(shape[:1]), torch.float32))

    def pack(self, weight: Tensor, name: str) -> tuple[Tensor, ...]:
        """Returns integers and scales. Raises SpecError unless every number is finite."""
        integers = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty(len(weight), dtype=torch.float32)
        num_rows = max(1, self.bytes_at_once // (4 * max(1, weight.shape[1])))
        for at in range(0, len(weight), num_rows):
            part = slice(at, at + num_rows)
            rows = weight[part].float()
            largest = rows.abs().amax(1) / self.largest
            scales[part] = torch.where(largest == 0, 1.0, largest)
            integers[part] = (rows / scales[part, None]).round_()
        if not bool(scales.isfinite().all()):
            raise SpecError(name, "holds numbers that are not finite", "a spec without model.quantization")
        return integers, scales

    def unpack(self, *packed: Tensor) -> Tensor:
        """Integers times their row's scale."""
        integers, scales = packed
        return integers.float() * scales[:, None]


INT8 = Int8()

QUANTIZATIONS: Mapping[str, Quantization] = MappingProxyType({each.name: each for each in (INT8,)})
"""By name."""


def quantization_of(source: str) -> Quantization | None:
    """Returns the quantization that makes what bindings of `source` name; None for weights as they are stored."""
    return next((each for each in QUANTIZATIONS.values() if source in each.sources), None)
