"""What penalties are counted over, as tensors that are kept up from step to step. Torch; one thread only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from aotgaudi.engine.steps import TokenHistory


class HistoryTensors:
    """`output_counts` [b, vocab] float32 and `prompt_mask` [b, vocab] bool of the sequences in a batch's rows.

    A row that keeps its sequence costs the tokens that are new; a row that gets another one is counted anew.
    Rows without a history keep what they had: neutral penalties multiply it by nothing.
    """

    def __init__(self, batch_size: int, vocab_size: int) -> None:
        self.output_counts = torch.zeros(batch_size, vocab_size)
        self.prompt_mask = torch.zeros(batch_size, vocab_size, dtype=torch.bool)
        self._owners: list[TokenHistory | None] = [None] * batch_size
        self._num_counted = [0] * batch_size

    def update(self, histories: Sequence[TokenHistory | None]) -> None:
        """Brings the rows up to date with `histories`, one a row."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, history in enumerate(histories):
            if history is None:
                continue
            if self._owners[row] is not history:
                self._begin(row, history)
            fresh = history.token_ids[self._num_counted[row] :]
            rows += [row] * len(fresh)
            tokens += fresh
            self._num_counted[row] += len(fresh)
        if rows:
            self.output_counts.index_put_((_ids(rows), _ids(tokens)), torch.ones(()), accumulate=True)

    def _begin(self, row: int, history: TokenHistory) -> None:
        self._owners[row], self._num_counted[row] = history, history.num_prompt_tokens
        self.output_counts[row] = 0
        self.prompt_mask[row] = False
        self.prompt_mask[row, _ids(history.token_ids[: history.num_prompt_tokens])] = True


def _ids(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
