"""What the scheduler asks of the bucket table, and what it says when the table has a hole."""

from __future__ import annotations

from typing import Protocol

from aotgaudi.engine.request import Request
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import CoverageError


class StepTable(Protocol):
    """Finds the entry that covers a step. What covers a step covers every smaller one."""

    def find_prompt(self, batch_size: int, query_len: int, num_ctx_blocks: int) -> PromptEntry | None:
        """Returns the covering entry of least cost, or None."""
        ...

    def find_decode(self, batch_size: int, num_blocks: int) -> DecodeEntry | None:
        """Returns the covering entry of least cost, or None."""
        ...

    def max_query_len(self, num_ctx_blocks: int, batch_size: int = 1) -> int:
        """Returns the longest covered query after that many cached blocks; 0 where none is."""
        ...


class UncoveredStepError(CoverageError):
    """No entry covers even one row of `request`; `needed` is the exact shape that an entry has to cover."""

    def __init__(self, request: Request, needed: PromptEntry | DecodeEntry) -> None:
        self.request, self.needed = request, needed
        super().__init__(
            f"no entry covers the step {needed} of request {request.request_id!r}: "
            "the manifest's coverage has a hole (`aotgaudi coverage` names it)"
        )
