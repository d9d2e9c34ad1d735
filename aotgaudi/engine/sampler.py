"""Samples token ids from logits, and scores the tokens of prompts. Uses torch, on one thread only.

Tokens are sampled with the graph for the batch's signature. No graph exists only for scoring (docs/adr/0017-engine.md): the
head of a prompt entry gives only the logits of each row's last token, and the head of a decode entry, which takes the same
hidden states, gives the logits of all its tokens. So the other tokens go through the heads of warm decode entries, as many
at once as the widest takes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aotgaudi.engine.constraints import Constraint, mask_bytes
from aotgaudi.engine.steps import GREEDY_ROW, PromptStep, SamplingRow, StepResult, TokenHistory, TokenLogprobs
from aotgaudi.entries import Entry
from aotgaudi.errors import NotWarmError, RequestError
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.graphs.step_inputs import CONSTRAINT_INPUTS
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable
from aotgaudi.spec.sampler_signature import NUM_BIASED_TOKENS, join_all


class HistoryTensors:
    """The inputs of penalties: `output_counts` [b, vocab] float32 and `prompt_mask` [b, vocab] bool.

    Both are kept from step to step. A row that keeps its sequence counts only its new tokens. A row that gets another
    sequence is counted from the start. A row without a history keeps its old counts, which neutral penalties ignore.
    """

    def __init__(self, batch_size: int, vocab_size: int) -> None:
        self.output_counts = torch.zeros(batch_size, vocab_size)
        self.prompt_mask = torch.zeros(batch_size, vocab_size, dtype=torch.bool)
        self._owners: list[TokenHistory | None] = [None] * batch_size
        self._num_counted = [0] * batch_size

    def update(self, histories: Sequence[TokenHistory | None]) -> None:
        """Updates the rows to `histories`, one for each row."""
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
            self.output_counts.index_put_((to_ids(rows), to_ids(tokens)), torch.ones(()), accumulate=True)

    def _begin(self, row: int, history: TokenHistory) -> None:
        self._owners[row], self._num_counted[row] = history, history.num_prompt_tokens
        self.output_counts[row] = 0
        self.prompt_mask[row] = False
        self.prompt_mask[row, to_ids(history.token_ids[: history.num_prompt_tokens])] = True


class ConstraintTensors:
    """The inputs of constraints.

    They are `token_mask` [b, ceil(vocab / 32)] int32, `bias_token_ids` [b, 300] int64, and `biases` [b, 300] float32.

    All are kept from step to step, and only rows whose values may have changed are written. A row without constraints allows
    every token and has no bias.
    """

    def __init__(self, batch_size: int, vocab_size: int) -> None:
        self._num_bytes = mask_bytes(vocab_size)
        self._masks = bytearray(b"\xff" * (batch_size * self._num_bytes))
        self.token_mask = torch.frombuffer(self._masks, dtype=torch.int32).view(batch_size, -1)
        self.bias_token_ids = torch.zeros(batch_size, NUM_BIASED_TOKENS, dtype=torch.int64)
        self.biases = torch.zeros(batch_size, NUM_BIASED_TOKENS)
        self._masked: set[int] = set()
        self._biased: list[tuple[tuple[int, float], ...]] = [()] * batch_size

    def update(self, constraints: Sequence[Constraint | None]) -> dict[int, RequestError]:
        """Updates the rows. Returns the errors of failed constraints by row. A row that failed allows every token."""
        failures: dict[int, RequestError] = {}
        for row, constraint in enumerate(constraints):
            try:
                self._set_mask(row, None if constraint is None else constraint.mask())
            except RequestError as error:
                failures[row] = error
                self._set_mask(row, None)
            self._set_biases(row, () if constraint is None else constraint.params.logit_bias)
        return failures

    def _set_mask(self, row: int, mask: bytes | None) -> None:
        place = slice(row * self._num_bytes, (row + 1) * self._num_bytes)
        if mask is not None:
            self._masks[place] = mask
            self._masked.add(row)
        elif row in self._masked:
            self._masks[place] = b"\xff" * self._num_bytes
            self._masked.remove(row)

    def _set_biases(self, row: int, biases: tuple[tuple[int, float], ...]) -> None:
        if biases == self._biased[row]:
            return
        self._biased[row] = biases
        self.bias_token_ids[row], self.biases[row] = 0, 0
        self.bias_token_ids[row, : len(biases)] = to_ids(token_id for token_id, _ in biases)
        self.biases[row, : len(biases)] = torch.tensor([bias for _, bias in biases])


class Sampler:
    """Samples rows of logits. `program_of` returns the program of an entry or raises."""

    def __init__(self, table: ExecutableTable, program_of: Callable[[Entry], BoundProgram]) -> None:
        self._table, self._program_of = table, program_of
        self._sizes = table.sampler_sizes()
        self._histories: dict[int, HistoryTensors] = {}
        self._constraints: dict[int, ConstraintTensors] = {}

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow | None]) -> StepResult:
        """Samples the rows that are not None. `logits` is [b, vocab] with b at least the number of rows.

        If no sampler has the batch size b, only the rows to be sampled are run, in as few batches as the sizes of samplers
        allow. Padding repeats one of these rows.
        """
        result = StepResult([None] * len(rows))
        wanted = [r for r, row in enumerate(rows) if row is not None]
        if wanted:
            self._sample(logits, rows, wanted, result)
        result.invalid_rows.update(_invalid_rows(self._table.placement.get(logits), result.token_ids))
        return result

    def _sample(
        self, logits: Tensor, rows: Sequence[SamplingRow | None], wanted: list[int], result: StepResult
    ) -> None:
        if logits.shape[0] in self._sizes:
            batch = [row or GREEDY_ROW for row in rows] + [GREEDY_ROW] * (logits.shape[0] - len(rows))
            self._run(logits, batch, {r: r for r in wanted}, result)
            return
        largest = self._sizes[-1]
        for start in range(0, len(wanted), largest):
            part = wanted[start : start + largest]
            size = next(s for s in self._sizes if s >= len(part))
            picked = part + part[:1] * (size - len(part))
            batch = [rows[r] or GREEDY_ROW for r in picked]
            some = self._table.placement.get(logits).index_select(0, to_ids(picked))
            self._run(some, batch, dict(enumerate(part)), result)

    def _run(
        self, logits: Tensor, batch: Sequence[SamplingRow], places: dict[int, int], result: StepResult
    ) -> None:
        """Runs one sampler. `places` maps places in its batch to the rows of `result` that they fill."""
        entry = self._table.sampler(len(batch), join_all(row.params.signature for row in batch))
        program = self._program_of(entry)
        constraints, failures = self._constrain(logits, batch, entry.constraints)
        inputs = [self._input(spec, logits, batch, constraints) for spec in program.inputs]
        tokens, *logprobs = [output.tolist() for output in program.run(inputs)]
        for place, r in places.items():
            result.token_ids[r] = tokens[place]
            if place in failures:
                result.refused_rows[r] = failures[place]
            num_logprobs = batch[place].params.logprobs
            if num_logprobs is not None:
                chosen, ids, values = (column[place] for column in logprobs)
                result.logprobs[r] = TokenLogprobs(
                    chosen, tuple(zip(ids, values, strict=True))[:num_logprobs]
                )

    def _constrain(
        self, logits: Tensor, batch: Sequence[SamplingRow], is_needed: bool
    ) -> tuple[Mapping[str, Tensor], Mapping[int, RequestError]]:
        """Returns the inputs of constraints by name and the failures by row, both empty unless the graph needs them."""
        if not is_needed:
            return {}, {}
        tensors = self._constraints.get(len(batch))
        if tensors is None:
            tensors = self._constraints[len(batch)] = ConstraintTensors(*logits.shape)
        failures = tensors.update([row.constraint for row in batch])
        return {name: getattr(tensors, name) for name in CONSTRAINT_INPUTS}, failures

    def _input(
        self,
        spec: TensorSpec,
        logits: Tensor,
        batch: Sequence[SamplingRow],
        constraints: Mapping[str, Tensor],
    ) -> Tensor:
        """Returns one input of a sampler (graphs/step_inputs.py). Most inputs hold one of `SamplingParams` for each row."""
        if spec.name == "logits":
            return logits
        if spec.name in constraints:
            return constraints[spec.name]
        if spec.name == "output_counts":
            return self._history(logits, batch).output_counts
        if spec.name == "prompt_mask":
            return self._history(logits, batch).prompt_mask
        dtype = getattr(torch, spec.dtype)
        if spec.name == "noise":
            return torch.tensor([row.noise for row in batch], dtype=dtype)
        return torch.tensor([getattr(row.params, spec.name) for row in batch], dtype=dtype)

    def _history(self, logits: Tensor, batch: Sequence[SamplingRow]) -> HistoryTensors:
        tensors = self._histories.get(len(batch))
        if tensors is None:
            tensors = self._histories[len(batch)] = HistoryTensors(*logits.shape)
        tensors.update([row.history for row in batch])
        return tensors


def _invalid_rows(logits: Tensor, token_ids: Sequence[int | None]) -> Iterable[int]:
    """Yields the rows without a finite maximum, without a pass over all logits.

    In such a row, a sampler chooses a token whose logit is not finite (the arg-max), or the first or the last token
    (cumulative probabilities of NaN, or of nothing; graphs/sampler.py). So only rows with such a token are checked whole.
    Rows that are not sampled are judged by their first logit, because one NaN in a hidden state makes all logits NaN.
    """
    width = logits.shape[1]
    edges = (0, width - 1)
    values = logits.take(to_ids(row * width + (i or 0) for row, i in enumerate(token_ids))).tolist()
    for row, (token_id, value) in enumerate(zip(token_ids, values, strict=True)):
        if (token_id in edges or not math.isfinite(value)) and not math.isfinite(logits[row].amax().item()):
            yield row


@dataclass(frozen=True, slots=True)
class _Place:
    """A token's number among all tokens of the step, and the token that follows it in the prompt of `row`."""

    row: int
    token: int
    target: int
    num_top: int


class Scorer:
    """Scores prompts. `program_of` returns the program of an entry or raises."""

    def __init__(self, table: ExecutableTable, program_of: Callable[[Entry], BoundProgram]) -> None:
        self._table, self._program_of = table, program_of

    def score(self, step: PromptStep, hidden: Tensor, result: StepResult) -> None:
        """Adds the log-probabilities that the rows of `step` ask for to `result`.

        `hidden` is [..., T, X] for all tokens of the step, padding included. A row whose log-probabilities are NaN is
        invalid.

        Raises:
            NotWarmError: no decode entry is warm.
        """
        heads = self._table.heads()
        if not heads:
            raise NotWarmError(
                "no decode entry is warm, and log-probabilities of prompts need the head of one"
            )
        places, widest = list(_places(step)), max(heads)
        placement = self._table.placement
        hidden = placement.get(hidden)
        found: dict[int, list[TokenLogprobs]] = {place.row: [] for place in places}
        for start in range(0, len(places), widest):
            part = places[start : start + widest]
            size = min(size for size in heads if size >= len(part))
            tokens = [place.token for place in part]
            padded = tokens + tokens[:1] * (size - len(part))
            rows = hidden.index_select(-2, to_ids(padded))
            logits = placement.get(self._program_of(heads[size]).run_head(rows))
            for place, values in zip(part, _logprobs(logits[: len(part)], part), strict=True):
                found[place.row].append(values)
        for row, all_values in found.items():
            result.prompt_logprobs[row] = tuple(all_values)
            if any(math.isnan(values.logprob) for values in all_values):
                result.invalid_rows.add(row)


def _places(step: PromptStep) -> Iterator[_Place]:
    for row, chunk in enumerate(step.rows):
        scoring = chunk.scoring
        if scoring is not None:
            first = row * step.entry.query_len + scoring.first
            for token, target in enumerate(scoring.targets, first):
                yield _Place(row, token, target, scoring.num_top)


def _logprobs(logits: Tensor, places: Sequence[_Place]) -> Iterator[TokenLogprobs]:
    """Yields the log-probabilities of each place under plain softmax. `logits` is [places, vocab]."""
    scores = logits.float()
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    own = scores.gather(1, to_ids(place.target for place in places)[:, None])
    num_top = min(max(place.num_top for place in places), scores.shape[1])
    top, ids = scores.topk(num_top, dim=-1)
    columns = (own - total)[:, 0], (scores > own).sum(-1) + 1, ids, top - total
    rows = zip(places, *(column.tolist() for column in columns), strict=True)
    for place, logprob, rank, top_ids, values in rows:
        likeliest = tuple(zip(top_ids, values, strict=True))[: place.num_top]
        yield TokenLogprobs(logprob, likeliest, rank)


def to_ids(values: Iterable[int]) -> Tensor:
    """Returns `values` as a tensor [n] int64. Many times faster than `torch.tensor`, which inspects every number's type."""
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
