"""Weights in 8 bits: how integers and scales are made of a checkpoint's numbers. Version 1 of the binding ``int8``.

Each output channel, a row of the weight, has one scale: its largest magnitude / 127, in float32. An integer is the nearest
one to number / scale, ties to even, so it is never outside -127 to 127. A row of zeros has the scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aotgaudi.errors import SpecError

LARGEST = 127

_BYTES_AT_ONCE = 1 << 19
"""Of float32 beside the weight: they stay in a core's cache from one operation to the next."""


def quantized(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns int8 integers [N, K], and float32 scales [N], of a weight [N, K]. Raises SpecError unless all is finite."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32)
    num_rows = max(1, _BYTES_AT_ONCE // (4 * max(1, weight.shape[1])))
    for at in range(0, len(weight), num_rows):
        part = slice(at, at + num_rows)
        rows = weight[part].float()
        largest = rows.abs().amax(1) / LARGEST
        scales[part] = torch.where(largest == 0, 1.0, largest)
        integers[part] = (rows / scales[part, None]).round_()
    if not bool(scales.isfinite().all()):
        raise SpecError(name, "holds numbers that are not finite", "a spec without model.quantization")
    return integers, scales
