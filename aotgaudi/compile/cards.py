"""Builds for accelerator cards: workers that hold them, and the proof that a new process finds every recipe.

There is a worker for each card, with its own directory of recipes. Tracing runs in other processes, as many as requested,
without the bridge. A card's worker gets its whole environment when it starts, because the bridge reads it when torch is
imported (K-01). Both variables that name a card are set: with only the first one, the bridge would take another card if this
one is busy (K-25). This module imports no torch.

Each round of a proof is a new process whose directory holds the recorded recipes. If the first one compiles something, the
keys of some units depend on what ran before them (K-10): it is recorded for the programs, and the second must find
everything.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.compile.jobs import ModelCheckJob, TraceJob, logged_errors
from aotgaudi.compile.keys import PROVED_BACKENDS, ProofRow, read_rows, record
from aotgaudi.compile.plan import Plan
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS, Done, Job, LocalPool, Pool, run_all
from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import CardError, CompileError, NotWarmError
from aotgaudi.gaudi.environment import WITHOUT_BRIDGE, process_environment
from aotgaudi.gaudi.identity import usable_modules
from aotgaudi.gaudi.recipes import RecipeName, materialise
from aotgaudi.graphs.program import Program
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.scratch import locked_directory
from aotgaudi.store.store import Store

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


_NUM_ROUNDS = 2
_MOST_NAMED = 5

Files = Mapping[str, str]
"""Name -> digest."""


@dataclass(frozen=True)
class Round:
    """What a process reported: what it compiled (label, key), and the resulting files."""

    compiled: tuple[tuple[str, str], ...]
    files: Files


@dataclass(frozen=True)
class ProveJob:
    """Run `programs` (digests) of `units` (key -> label, files) in a process whose directory has `recipes`."""

    programs: tuple[str, ...]
    units: Mapping[str, tuple[str, Files]]
    recipes: Files
    target: Target
    store_root: Path
    log_path: Path
    lower: tuple[Path, ...] = ()
    label: str = "proof"

    def run(self) -> Round:
        """Raises CompileError, StoreError."""
        with logged_errors(self):
            from aotgaudi.backends.hpu.compiler import StoredUnit, look

            objects = ObjectStore(self.store_root, self.lower, heals=True)
            programs = [
                Program.model_validate_json(objects.read(Digest.parse(digest))) for digest in self.programs
            ]
            units = {
                key: StoredUnit(
                    label,
                    {name: objects.path(Digest.parse(digest)) for name, digest in files.items()},
                    is_foreign=any(
                        self.recipes.get(name, digest) != digest for name, digest in files.items()
                    ),
                )
                for key, (label, files) in self.units.items()
            }
            compiled, files = look(programs, units, self.target)
            return Round(compiled, {name: str(objects.put_file(path)) for name, path in files.items()})


def find_proof(plan: Plan, store: Store) -> ProofRow | None:
    """Returns the recorded proof of the complete programs of `plan`; None without one."""
    key = proof_key(plan)
    return read_rows(ProofRow, store, (key,)).get(key)


def require_proof(plan: Plan, store: Store) -> ProofRow | None:
    """Returns the proof of what `plan` has; None for a backend that needs none. Raises NotWarmError if it is missing."""
    if plan.target.backend not in PROVED_BACKENDS:
        return None
    found = find_proof(plan, store)
    if found is None:
        raise NotWarmError(
            "what the store has was not proved to load in a new process (run: aotgaudi build cache MANIFEST)"
        )
    return found


def prove(plan: Plan, store: Store, timeout_seconds: float) -> ProofRow:
    """Returns the proof of all complete programs of `plan`. Runs processes on a card unless there is a proof already.

    Raises CompileError, naming the units, if keys do not settle.
    """
    found = find_proof(plan, store)
    if found is not None:
        return found
    units = _units(plan)
    late: dict[str, str] = {}
    last: Round | None = None
    for number in range(1, _NUM_ROUNDS + 1):
        last = _round(plan, store, units, late, timeout_seconds)
        if not last.compiled:
            row = ProofRow(
                recipes=_parsed(late), num_recipes=len(_recipes(units, late)) // 2, num_rounds=number
            )
            record(store, proof_key(plan), row)
            return row
        late |= last.files
    assert last is not None
    labels = list(dict.fromkeys(label for label, _ in last.compiled))
    more = f" and {len(labels) - _MOST_NAMED} more" if len(labels) > _MOST_NAMED else ""
    raise CompileError(
        f"proof: after {_NUM_ROUNDS} rounds a new process still compiles {len(last.compiled)} graphs, so their keys do not"
        f" settle: {', '.join(labels[:_MOST_NAMED])}{more} (aotgaudi doctor --hpu, H-06)"
    )


def _round(
    plan: Plan,
    store: Store,
    units: Mapping[str, tuple[str, Files]],
    late: Files,
    timeout_seconds: float,
) -> Round:
    recipes = _recipes(units, late)
    with locked_directory(store.root) as scratch:
        directory = scratch / "recipes"
        objects = _parsed(recipes)
        materialise({name: (one, store.objects.path(one)) for name, one in objects.items()}, directory)
        directory.chmod(0o700)  # So that what is compiled is stored, and that it can be removed.
        job = ProveJob(
            programs=_programs(plan),
            units=units,
            recipes=recipes,
            target=plan.target,
            store_root=store.root,
            log_path=store.root / "logs" / "proof.log",
            lower=store.lower,
        )
        environment = card_environment(directory, usable_modules(os.environ)[0])
        pool = LocalPool(
            1, store.root / "toolcache", timeout_seconds=timeout_seconds, environment=environment
        )
        found: list[Round] = run_all(pool, [job])
    return found[0]


def _parsed(files: Files) -> dict[str, Digest]:
    return {name: Digest.parse(digest) for name, digest in files.items()}


def _programs(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.program for _, row in plan.complete))


def _units(plan: Plan) -> dict[str, tuple[str, Files]]:
    return {
        key: (
            plan.units[key].label,
            {name: str(digest) for name, digest in plan.units[key].artifact.items()},
        )
        for key in sorted({key for _, row in plan.complete for key in row.units})
    }


def _recipes(units: Mapping[str, tuple[str, Files]], late: Files) -> dict[str, str]:
    """Returns the recipes of all units, one file a name: the one with the smallest digest, as a server chooses it."""
    chosen: dict[str, str] = {}
    for files in (late, *(files for _, files in units.values())):
        for name, digest in files.items():
            if RecipeName.parse(name) is not None:
                chosen[name] = min(digest, chosen.get(name, digest))
    return chosen


def proof_key(plan: Plan) -> str:
    """Returns the key of the proof of the complete programs of `plan`, 64 hex digits."""
    content = [sorted(_programs(plan)), {key: files for key, (_, files) in _units(plan).items()}]
    return sha256_bytes(b"aotgaudi.proof/1\n" + canonical_json(content))
