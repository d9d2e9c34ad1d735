"""Computes log-probabilities of prompts from the hidden states of a prompt step. Uses torch, on one thread only.

The head of a prompt entry gives only the logits of each row's last token. The head of a decode entry takes the same hidden
states and gives the logits of all its tokens. So the other tokens go through the heads of warm decode entries, as many at
once as the widest takes. No graph exists only for this purpose (docs/adr/0017-engine.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aotgaudi.engine.sampler import to_ids
from aotgaudi.engine.steps import PromptStep, StepResult, TokenLogprobs
from aotgaudi.entries import Entry
from aotgaudi.errors import NotWarmError
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable


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
