"""Trying a transfer again: how often, and after which waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from aotgaudi.errors import RemoteError


class TransientError(RemoteError):
    """A remote that may answer when it is asked again. `wait_seconds` is what it asked for, if it did."""

    def __init__(self, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """At most `num_attempts`, with waits of 0.5, 1, 2, ... seconds between them, none above `longest_wait_seconds`.

    None begins when `longest_seconds` have passed since the first began: attempts that took long are few.

    `sleep` and `clock` (seconds, monotonic) are the time's; tests bring their own.
    """

    num_attempts: int = 5
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 20.0
    longest_seconds: float = 60.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def call(self, action: Callable[[], T]) -> T:
        """Runs `action` until it raises no TransientError. Raises the last one, and every other error at once."""
        began = self.clock()
        for attempt in range(self.num_attempts - 1):
            try:
                return action()
            except TransientError as error:
                if self.is_over(began):
                    raise
                self.wait(attempt, error)
        return action()

    def is_over(self, began: float) -> bool:
        """Whether no attempt may begin any more, the first having begun at `began` (by `clock`)."""
        return self.clock() - began > self.longest_seconds

    def wait(self, attempt: int, error: TransientError) -> None:
        """Waits after the failure number `attempt` (from 0): as long as the remote asked for, within our bound."""
        backoff = self.first_wait_seconds * 2**attempt
        asked = backoff if error.wait_seconds is None else max(backoff, error.wait_seconds)
        self.sleep(min(asked, self.longest_wait_seconds))
