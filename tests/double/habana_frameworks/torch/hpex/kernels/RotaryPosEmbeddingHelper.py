"""D-28: rotary embedding as one operator.

Source: the formulas in ``hpex/kernels/RotaryPosEmbeddingHelper.py`` of the bridge; there, too, the operator takes the
sine first. Positions and an offset are refused: nothing here uses them.
"""

from __future__ import annotations

import enum

import torch

_LIBRARY = torch.library.Library("hpu", "FRAGMENT")
_LIBRARY.define(
    "rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode) -> Tensor"
)


class RotaryPosEmbeddingMode(enum.Enum):
    """Which values are a pair: those half a row apart, or neighbours."""

    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(
    p: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    """Returns `p` rotated; in float32 where any of the three is, else in the type of `p`."""
    tensors = (p, sin, cos)
    dtype = torch.float32 if any(tensor.dtype is torch.float32 for tensor in tensors) else p.dtype
    values, sine, cosine = (tensor.to(dtype) for tensor in tensors)
    found: torch.Tensor = torch.ops.hpu.rotary_pos_embedding(
        values, sine, cosine, position_ids, offset, mode.value
    )
    return found


def _run(values, sin, cos, position_ids, offset, mode):  # type: ignore[no-untyped-def]
    if position_ids is not None or offset:
        raise NotImplementedError("the double's rotary embedding takes neither positions nor an offset")
    if RotaryPosEmbeddingMode(mode) is RotaryPosEmbeddingMode.BLOCKWISE:
        first, second = values.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-values[..., 1::2], values[..., ::2]), dim=-1).flatten(-2)
    return values * cos + turned * sin


def _fake(values, *rest):  # type: ignore[no-untyped-def]
    del rest
    return torch.empty_like(values, memory_format=torch.contiguous_format)


_LIBRARY.impl("rotary_pos_embedding", _run, "CPU")
_LIBRARY.impl("rotary_pos_embedding", _fake, "Meta")
