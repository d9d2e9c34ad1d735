"""Steps: what the scheduler asks the runner to do. Plain values, no torch.

The scheduler thinks in requests and blocks; the runner turns a step into the padded tensors of the
step's entry. Block 0 is the padding block: it is never handed out, and everything that is padding
reads from it and writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Union

from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """The known tokens of one sequence, prompt first: what penalties are counted over.

    `token_ids` is the request's own list, which grows between steps; the value is compared by identity, so that
    a runner can tell what it has counted already.
    """

    token_ids: list[int]
    num_prompt_tokens: int


_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row is sampled. `noise` is uniform in [0, 1), drawn from the request's own generator.

    `history` is there where `params` has penalties.
    """

    params: SamplingParams = _GREEDY
    noise: float = 0.0
    history: TokenHistory | None = None


GREEDY_ROW = SamplingRow()
"""How padding is sampled."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One chunk of one sequence: `token_ids` are new, `start` tokens are already in the cache.

    `block_table` holds the block ids of the sequence from position 0, enough for start + len(token_ids).
    `sampling` is None unless the chunk ends the sequence's known tokens, and a token must be sampled.
    """

    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    sampling: SamplingRow | None


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's newest token at `position`; `block_table` covers positions 0..position."""

    token_id: int
    position: int
    block_table: tuple[int, ...]
    sampling: SamplingRow


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A prefill step; ``len(rows) <= entry.batch_size`` and every row fits the entry."""

    entry: PromptEntry
    rows: tuple[PromptRow, ...]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step; the rows' block tables together fit ``entry.num_blocks``."""

    entry: DecodeEntry
    rows: tuple[DecodeRow, ...]


@dataclass(frozen=True, slots=True)
class DefragStep:
    """Exchanges the contents of block pairs ``(source, destination)`` in every layer's cache."""

    entry: DefragEntry
    moves: tuple[tuple[int, int], ...]


Step = Union[PromptStep, DecodeStep]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the model's own distribution) at one place of an output.

    `logprob` is the sampled token's; `top` are the likeliest tokens and theirs, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One token id a row, None where the row has no `sampling`; log-probabilities of the rows that asked."""

    token_ids: list[int | None]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class StepRunner(Protocol):
    """Runs steps on the device. One thread only."""

    def run(self, step: Step) -> StepResult:
        """Runs a step and samples."""
        ...

    def exchange(self, step: DefragStep) -> None:
        """Exchanges block contents."""
        ...
