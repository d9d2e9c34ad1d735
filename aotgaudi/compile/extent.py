"""How much is built: a tier, so many entries, or what can be done in so many seconds; and what stops a build then."""

from __future__ import annotations

import time
from dataclasses import dataclass

from aotgaudi.compile.run import Watch
from aotgaudi.entries import Entry


@dataclass(frozen=True)
class Extent:
    """Some entries of a manifest, by importance, to be built in this order.

    The first `num_certain` are built however long it takes, since fewer could not be served. `seconds`: of the others no job
    is begun later than that; None: all are built.
    """

    entries: tuple[Entry, ...]
    num_certain: int = 0
    seconds: float | None = None

    @property
    def certain(self) -> tuple[Entry, ...]:
        """What is built in any case."""
        return self.entries[: self.num_certain]


class Deadline(Watch):
    """Stops a run so many seconds from now, or where `inner` would. Shows what `inner` shows."""

    def __init__(self, inner: Watch, seconds: float) -> None:
        super().__init__(inner.show, inner.should_stop)
        self._inner, self._at = inner, time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether it is the time that stops the run, and nothing else."""
        return time.monotonic() >= self._at and not self._inner.should_stop()

    def __enter__(self) -> Deadline:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._inner.__exit__(kind, *rest)

    def should_stop(self) -> bool:
        """See `Watch.should_stop`."""
        return super().should_stop() or time.monotonic() >= self._at
