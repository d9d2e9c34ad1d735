"""Steps, which the scheduler forms and the runner runs, and the table that finds their entries. Plain values, no torch.

The scheduler works with requests and blocks. The runner turns a step into the padded tensors of the step's entry. Block 0 is
the padding block. It is never handed out, and all padding reads from it and writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Union

from aotgaudi.engine.constraints import Constraint
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry
from aotgaudi.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """The known tokens of one sequence, prompt first, to which penalties apply.

    `token_ids` is the request's own list, which grows between steps. Histories are compared by identity, so that a runner
    knows which tokens it has counted already.
    """

    token_ids: list[int]
    num_prompt_tokens: int


_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row is sampled. `noise` is uniform in [0, 1), drawn from the request's own generator.

    `history` is set only if `params` has penalties, `constraint` only if it has constraints.
    """

    params: SamplingParams = _GREEDY
    noise: float = 0.0
    history: TokenHistory | None = None
    constraint: Constraint | None = None


GREEDY_ROW = SamplingRow()
"""The sampling of padding rows."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens of a prompt to score: the `targets`, which follow a row's tokens from `first` on.

    For each, the log-probabilities of the `num_top` likeliest tokens are returned too.
    """

    first: int
    targets: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One chunk of one sequence: `token_ids` are new, `start` tokens are already in the cache.

    `block_table` holds the block ids of the sequence from position 0, enough for start + len(token_ids) tokens. `sampling`
    is set only if the chunk ends with the last known token, so that the next token must be sampled. `scoring` is set if
    log-probabilities of the prompt are wanted.
    """

    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    sampling: SamplingRow | None
    scoring: Scoring | None = None


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's newest token, at `position`. `block_table` covers positions 0..position."""

    token_id: int
    position: int
    block_table: tuple[int, ...]
    sampling: SamplingRow


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A prefill step. ``len(rows) <= entry.batch_size``, and every row fits the entry."""

    entry: PromptEntry
    rows: tuple[PromptRow, ...]

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of a prompt are wanted."""
        return any(row.scoring is not None for row in self.rows)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step. The rows' block tables together fit ``entry.num_blocks``."""

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
    """Natural logarithms of the probabilities that the model gave tokens at one place of an output or a prompt.

    `logprob` belongs to the token at that place. `top` holds the likeliest token ids with their log-probabilities, the
    likeliest first. `rank` is one more than the number of tokens that are likelier than the token.
    Only places of a prompt have it.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: one token id per row (None without `sampling`), and log-probabilities of the rows that asked.

    `prompt_logprobs` has the log-probabilities of a row's `scoring`, one for each target.

    `invalid_rows` are the rows whose logits have no finite maximum (NaN, or only infinities). `refused_rows` are the rows
    whose constraint has failed, with the reason. The token ids of both mean nothing.
    """

    token_ids: list[int | None]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    invalid_rows: set[int] = field(default_factory=set)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    refused_rows: dict[int, RequestError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepWork:
    """How much steps computed and read, split into what their rows needed and padding.

    Tokens are computed. Blocks are read: the context of prompts, and all blocks of decodes.
    """

    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_blocks: int = 0
    num_padding_blocks: int = 0

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.num_tokens + other.num_tokens,
            self.num_padding_tokens + other.num_padding_tokens,
            self.num_blocks + other.num_blocks,
            self.num_padding_blocks + other.num_padding_blocks,
        )


def work_of(step: Step, block_size: int) -> StepWork:
    """Returns the work of a step."""
    if isinstance(step, PromptStep):
        num_tokens = sum(len(row.token_ids) for row in step.rows)
        num_blocks = sum(-(-row.start // block_size) for row in step.rows)
        all_tokens = step.entry.batch_size * step.entry.query_len
        all_blocks = step.entry.batch_size * step.entry.num_ctx_blocks
    else:
        num_tokens, all_tokens = len(step.rows), step.entry.batch_size
        num_blocks, all_blocks = sum(len(row.block_table) for row in step.rows), step.entry.num_blocks
    return StepWork(num_tokens, all_tokens - num_tokens, num_blocks, all_blocks - num_blocks)


class StepTable(Protocol):
    """Finds the entry that covers a step. An entry that covers a step covers every smaller one."""

    def find_prompt(self, batch_size: int, query_len: int, num_ctx_blocks: int) -> PromptEntry | None:
        """Returns the cheapest entry that covers the step, or None."""
        ...

    def find_decode(self, batch_size: int, num_blocks: int) -> DecodeEntry | None:
        """Returns the cheapest entry that covers the step, or None."""
        ...

    def max_query_len(self, num_ctx_blocks: int, batch_size: int = 1) -> int:
        """Returns the longest covered query after this many cached blocks; 0 if none is covered."""
        ...


class StepRunner(Protocol):
    """Runs steps on the device. Used on one thread only."""

    def run(self, step: Step) -> StepResult:
        """Runs a step and samples."""
        ...

    def exchange(self, step: DefragStep) -> None:
        """Exchanges block contents."""
        ...

    def clear(self, blocks: Sequence[int]) -> None:
        """Clears blocks, so that their next owner reads no NaN."""
        ...
