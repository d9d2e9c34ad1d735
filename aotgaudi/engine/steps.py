"""Steps: what the scheduler asks the runner to do. Plain values, no torch.

The scheduler thinks in requests and blocks; the runner turns a step into the padded tensors of the
step's entry. Block 0 is the padding block: it is never handed out, and everything that is padding
reads from it and writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Union

from aotgaudi.manifest.entries import DecodeEntry, DefragEntry, PromptEntry


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row is sampled. `noise` is uniform in [0, 1), drawn from the request's own generator.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 filter nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    noise: float = 0.0


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


class StepRunner(Protocol):
    """Runs steps on the device. One thread only."""

    def run(self, step: Step) -> Sequence[int | None]:
        """Runs a step and samples. Returns one token id a row, None where the row has no `sampling`."""
        ...

    def exchange(self, step: DefragStep) -> None:
        """Exchanges block contents."""
        ...
