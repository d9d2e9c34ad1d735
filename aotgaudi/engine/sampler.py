"""Logits -> token ids, by the graph that the signature of the batch chooses. Torch; one thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from aotgaudi.engine.penalties import HistoryTensors
from aotgaudi.engine.steps import GREEDY_ROW, SamplingRow, StepResult, TokenLogprobs
from aotgaudi.entries import Entry
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable
from aotgaudi.spec.sampler_signature import join_all

_HISTORY_INPUTS = ("output_counts", "prompt_mask")


class Sampler:
    """Samples rows of logits. `program_of` gives the program of an entry, or raises."""

    def __init__(self, table: ExecutableTable, program_of: Callable[[Entry], BoundProgram]) -> None:
        self._table, self._program_of = table, program_of
        self._sizes = table.sampler_sizes()
        self._histories: dict[int, HistoryTensors] = {}

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> StepResult:
        """Samples the rows that are not None. `logits` [b, vocab], where b is at least the number of rows.

        Where the batch size has no sampler, the rows that sample are run alone, in as few runs as there are
        samplers for; padding repeats one of them.
        """
        result = StepResult([None] * len(rows))
        wanted = [r for r, row in enumerate(rows) if row is not None]
        if not wanted:
            return result
        if logits.shape[0] in self._sizes:
            batch = [row or GREEDY_ROW for row in rows] + [GREEDY_ROW] * (logits.shape[0] - len(rows))
            self._run(logits, batch, {r: r for r in wanted}, result)
            return result
        for part in _parts(wanted, self._sizes[-1]):
            size = next(s for s in self._sizes if s >= len(part))
            picked = part + part[:1] * (size - len(part))
            batch = [rows[r] or GREEDY_ROW for r in picked]
            self._run(logits.index_select(0, _ids(picked)), batch, dict(enumerate(part)), result)
        return result

    def _run(
        self, logits: Tensor, batch: Sequence[SamplingRow], places: dict[int, int], result: StepResult
    ) -> None:
        """Runs one sampler; `places` maps a place of its batch to the row of `result` that it answers."""
        entry = self._table.sampler(len(batch), join_all(row.params.signature for row in batch))
        program = self._program_of(entry)
        inputs = [self._input(spec.name, logits, batch) for spec in program.inputs]
        tokens, *logprobs = [output.tolist() for output in program.run(inputs)]
        for place, r in places.items():
            result.token_ids[r] = tokens[place]
            num_logprobs = batch[place].params.logprobs
            if num_logprobs is not None:
                chosen, ids, values = (column[place] for column in logprobs)
                result.logprobs[r] = TokenLogprobs(
                    chosen, tuple(zip(ids, values, strict=True))[:num_logprobs]
                )

    def _input(self, name: str, logits: Tensor, batch: Sequence[SamplingRow]) -> Tensor:
        """Returns one input of a sampler (graphs/step_inputs.py)."""
        if name == "logits":
            return logits
        if name == "noise":
            return torch.tensor([row.noise for row in batch], dtype=torch.float64)
        if name in _HISTORY_INPUTS:
            tensor: Tensor = getattr(self._history(logits, batch), name)
            return tensor
        dtype = torch.int64 if name == "top_k" else torch.float32
        return torch.tensor([getattr(row.params, name) for row in batch], dtype=dtype)

    def _history(self, logits: Tensor, batch: Sequence[SamplingRow]) -> HistoryTensors:
        tensors = self._histories.get(len(batch))
        if tensors is None:
            tensors = self._histories[len(batch)] = HistoryTensors(*logits.shape)
        tensors.update([row.history for row in batch])
        return tensors


def _parts(values: list[int], size: int) -> Iterable[list[int]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _ids(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
