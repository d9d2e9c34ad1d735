"""Compiles units again and compares them: does this machine still produce what the store has?

Bytes are compared, except for recipes (`aotgaudi.backends.offline.what_is_compared`).

All processes, directories and compiler caches are new. Nothing is published.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.backends.offline import differences, what_is_compared
from aotgaudi.compile.cards import local_pool
from aotgaudi.compile.jobs import CompileJob, compile_again
from aotgaudi.compile.plan import Plan
from aotgaudi.compile.workers import run_all
from aotgaudi.digest import Digest
from aotgaudi.errors import NotWarmError
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.scratch import plain_path
from aotgaudi.store.store import Store


@dataclass(frozen=True)
class Difference:
    """A file of a unit that differs from the stored one. `offset` is the first byte that differs, from 0.

    `stored` and `rebuilt` are digests (``sha256:<hex>:<size>``); None if that side has no such file.
    """

    unit: str
    label: str
    file: str
    offset: int
    stored: str | None
    rebuilt: str | None


@dataclass(frozen=True)
class Recheck:
    """The labels of the units that were compiled again, and the files that differ, as judged by `compared`."""

    labels: tuple[str, ...]
    differences: tuple[Difference, ...]
    seconds: float
    compared: str = "bytes"


def recheck(plan: Plan, store: Store, sample: int, num_workers: int) -> Recheck:
    """Compiles up to `sample` units of `plan` that the store has once more, and compares the bytes.

    The units are chosen by their keys, so the choice is always the same. Keys are hashes, so the choice covers all kinds of
    units.

    Raises:
        NotWarmError: no unit of the plan is in the store.
        CompileError: a unit no longer compiles.
        CorruptError: the store's copy, or the text of a unit, is damaged.
    """
    keys = sorted(plan.units)[:sample]
    if not keys:
        raise NotWarmError(
            "no unit of this manifest is in the store: nothing to compare with"
            " (run: aotgaudi build cache MANIFEST)"
        )
    started = time.monotonic()
    root = None if store.read_only else plain_path(store.root) / "tmp"  # Where later builders clean up.
    with tempfile.TemporaryDirectory(prefix="check-", dir=root) as scratch:
        jobs = [_job(key, plan, store, Path(scratch)) for key in keys]
        cache_dir = Path(scratch) / "toolcache"
        pool = local_pool(plan.target, nullcontext(Path(scratch)), min(num_workers, len(jobs)), cache_dir)
        found = tuple(difference for of_unit in run_all(pool, jobs) for difference in of_unit)
    labels = tuple(each.label for each in jobs)
    return Recheck(labels, found, time.monotonic() - started, what_is_compared(plan.target))


@dataclass(frozen=True)
class RecheckJob:
    """Compile the unit of `job` in a new directory below `scratch`, and compare it with the stored `artifact`."""

    job: CompileJob
    artifact: Mapping[str, Digest]
    scratch: Path

    @property
    def label(self) -> str:
        """The unit's label."""
        return self.job.label

    def run(self) -> tuple[Difference, ...]:
        """Returns the files that differ. Raises CompileError, CorruptError."""
        job = self.job
        objects = ObjectStore(job.store_root, job.lower)
        with tempfile.TemporaryDirectory(prefix="unit-", dir=self.scratch) as work_dir:
            rebuilt = compile_again(job, Path(work_dir)).files
            there = {name: objects.path(digest) for name, digest in self.artifact.items()}
            names = differences(job.target, there, rebuilt)
            return tuple(self._difference(name, objects, rebuilt.get(name)) for name in names)

    def _difference(self, name: str, objects: ObjectStore, path: Path | None) -> Difference:
        stored, data = self.artifact.get(name), None if path is None else path.read_bytes()
        offset = first_difference(objects.read(stored) if stored else b"", data or b"")
        was = None if stored is None else str(stored)
        now = None if data is None else str(Digest.of(data))
        return Difference(self.job.key, self.label, name, offset, was, now)


def first_difference(left: bytes, right: bytes) -> int:
    """Returns the offset at which two byte strings first differ; if one is a prefix of the other, its length."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _job(key: str, plan: Plan, store: Store, scratch: Path) -> RecheckJob:
    source = next(state.row.units[key] for state in plan.programs if state.row and key in state.row.units)
    log_path = scratch / "logs" / f"{key}.log"
    job = CompileJob(key, source.text, source.label, plan.target, store.root, log_path, store.lower)
    return RecheckJob(job, plan.units[key].artifact, scratch)
