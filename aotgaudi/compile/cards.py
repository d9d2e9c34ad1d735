"""Workers that hold accelerator cards, one for each card, each with its own directory of recipes. Imports no torch.

Tracing runs in other processes, as many as requested, without the bridge. A card's worker gets its whole environment when it
starts, because the bridge reads it when torch is imported (K-01). Both variables that name a card are set: with only the
first one, the bridge would take another card if this one is busy (K-25).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.compile.jobs import ModelCheckJob, TraceJob
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS, Done, Job, LocalPool, Pool
from aotgaudi.errors import CardError
from aotgaudi.gaudi.environment import WITHOUT_BRIDGE, process_environment
from aotgaudi.gaudi.identity import usable_modules

_POLL_SECONDS = 0.02
_ATTEMPTS = 2
_WITHOUT_CARD = (ModelCheckJob, TraceJob)


def local_pool(
    target: Target,
    scratch: AbstractContextManager[Path],
    num_workers: int,
    cache_dir: Path,
    timeout_seconds: float = UNIT_TIMEOUT_SECONDS,
) -> Pool[Job]:
    """Returns the pool that runs jobs for `target` on this machine. `scratch` provides a directory while the pool runs."""
    if target.backend != "hpu":
        return LocalPool(num_workers, cache_dir, timeout_seconds=timeout_seconds)
    return CardPool(scratch, num_workers, cache_dir, timeout_seconds)


def card_environment(directory: Path, module: int | None) -> Mapping[str, str]:
    """Returns the environment of a process that compiles into `directory` on the card `module`; None: on any free card."""
    return process_environment(os.environ, directory, module)


class CardPool:
    """One worker per card for jobs that need a card, and workers without the bridge for tracing.

    Jobs wait here until a worker of their kind is idle. If a worker gets no card, another one tries its job. If that happens
    twice with no job done on a card in between, all jobs that wait for a card fail.
    """

    def __init__(
        self,
        scratch: AbstractContextManager[Path],
        num_tracing: int,
        cache_dir: Path,
        timeout_seconds: float,
    ) -> None:
        """Raises TargetError if no card can be used."""
        self._cards, self._scratch, self._stack = usable_modules(os.environ), scratch, ExitStack()
        self._cache_dir, self._timeout_seconds = cache_dir, timeout_seconds
        self._tracing = LocalPool(
            num_tracing,
            cache_dir,
            timeout_seconds=timeout_seconds,
            environment={**os.environ, **WITHOUT_BRIDGE},
        )
        self._pools: list[LocalPool] = []
        self._running: dict[int, tuple[LocalPool, Job]] = {}
        self._num_without_card = 0
        self._waiting: deque[tuple[int, Job]] = deque()
        self.num_workers = num_tracing + len(self._cards)

    def __enter__(self) -> CardPool:
        directory = self._stack.enter_context(self._scratch)
        self._pools = [self._stack.enter_context(self._tracing)]
        for number, module in enumerate(self._cards):
            environment = card_environment(directory / f"recipes-{number}", module)
            pool = LocalPool(
                1, self._cache_dir, timeout_seconds=self._timeout_seconds, environment=environment
            )
            self._pools.append(self._stack.enter_context(pool))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._stack.__exit__(kind, *rest)  # type: ignore[arg-type]

    def submit(self, ticket: int, job: Job) -> None:
        """See `Pool.submit`."""
        self._waiting.append((ticket, job))
        self._start()

    def withdraw(self) -> list[int]:
        """See `Pool.withdraw`."""
        tickets = [ticket for ticket, _ in self._waiting]
        self._waiting.clear()
        return tickets

    def wait(self, timeout_seconds: float) -> list[Done]:
        """See `Pool.wait`."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            done = self._ended()
            self._start()
            if done or time.monotonic() >= deadline:
                return done
            time.sleep(_POLL_SECONDS)

    def _ended(self) -> list[Done]:
        found: list[Done] = []
        pools = {pool for pool, _ in self._running.values()}
        for one in [one for pool in pools for one in pool.wait(0.0)]:
            _, job = self._running.pop(one.ticket)
            if not isinstance(one.error, CardError):
                if not isinstance(job, _WITHOUT_CARD):
                    self._num_without_card = 0
                found.append(one)
                continue
            self._num_without_card += 1
            self._waiting.appendleft((one.ticket, job))
            if self._num_without_card >= _ATTEMPTS:
                waiting = [ticket for ticket, job in self._waiting if not isinstance(job, _WITHOUT_CARD)]
                found += [Done(ticket, error=one.error) for ticket in waiting]
                self._waiting = deque(row for row in self._waiting if isinstance(row[1], _WITHOUT_CARD))
        return found

    def _start(self) -> None:
        for _ in range(len(self._waiting)):
            ticket, job = self._waiting.popleft()
            pool = self._free(job)
            if pool is None:
                self._waiting.append((ticket, job))
                continue
            self._running[ticket] = pool, job
            pool.submit(ticket, job)

    def _free(self, job: Job) -> LocalPool | None:
        able = self._pools[:1] if isinstance(job, _WITHOUT_CARD) else self._pools[1:]
        busy = [pool for pool, _ in self._running.values()]
        return next((pool for pool in able if busy.count(pool) < pool.num_workers), None)
