"""Turns the outputs of a pooling model's prompt steps into embeddings. Uses torch, on one thread only.

The graph (graphs/pooler.py) pools a chunk. This module adds up the sums of chunks, so that a prompt may be computed in
chunks with any pooling type. For LAST, only the state of the last chunk counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from aotgaudi.engine.steps import PoolingRow, PromptRow, StepResult
from aotgaudi.spec.pooler import PoolerSpec


class Pooler:
    """Makes embeddings from the vectors that steps have pooled."""

    def __init__(self, spec: PoolerSpec) -> None:
        self._spec = spec

    def pool(self, vectors: Tensor, rows: Sequence[PromptRow]) -> StepResult:
        """Returns the embedding of each row that ends its prompt, and the carried sum of other rows.

        Rows with NaN or infinities are invalid.

        `vectors` is [batch size, hidden size] float32.
        """
        result = StepResult([None] * len(rows))
        is_finite = vectors.isfinite().all(-1).tolist()
        for r, row in enumerate(rows):
            if not is_finite[r]:
                result.invalid_rows.add(r)
            elif row.pooling is not None:
                result.pooled[r] = self._of_row(vectors[r], row.pooling)
        return result

    def _of_row(self, vector: Tensor, row: PoolingRow) -> bytes:
        kind = self._spec.pooling_type
        if kind == "LAST" and not row.is_last:
            return b""
        if row.carried:
            vector = vector + torch.frombuffer(bytearray(row.carried), dtype=torch.float32)
        return _to_bytes(self._finished(vector, row) if row.is_last else vector)

    def _finished(self, vector: Tensor, row: PoolingRow) -> Tensor:
        if self._spec.pooling_type == "MEAN":
            vector = vector / row.num_tokens
        vector = vector[: row.params.dimensions]
        return torch.nn.functional.normalize(vector, dim=0) if self._spec.normalize else vector


def _to_bytes(vector: Tensor) -> bytes:
    return array("f", vector.tolist()).tobytes()
