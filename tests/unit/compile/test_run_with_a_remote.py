"""A run looks up what its traces find while it goes on, compiles only what the remote lacks, and uploads what it made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aotgaudi.backends.fake import probe
from aotgaudi.compile.jobs import BuildJob, Built, CompileJob, TraceJob, find_row
from aotgaudi.compile.keys import record
from aotgaudi.compile.pipeline import fetch_missing, upload_all
from aotgaudi.compile.plan import make_plan
from aotgaudi.compile.run import BuildOutcome, Watch, run_plan
from aotgaudi.compile.workers import Done
from aotgaudi.entries import DefragEntry
from aotgaudi.errors import StoreError
from aotgaudi.share.remote import Remote
from aotgaudi.share.remote_cache import RemoteCache
from aotgaudi.store.store import Store
from tests.remotes import Place, place
from tests.unit.compile.test_read_through import unit_row
from tests.workload import PoolInThisProcess, key_of, seed, tiny_spec

__all__ = ["place"]

LABELS = (("layer a", "head b"), ("layer a", "head c"))
ENTRIES = [DefragEntry(number) for number in (1, 2)]


class PoolInPlace(PoolInThisProcess):
    """Does jobs in this process, of programs and units that `source` has or knows how to make."""

    def __init__(self, source: Store, store: Store) -> None:
        super().__init__(2)
        self.jobs: list[str] = []
        self._source, self._store = source, store

    def submit(self, ticket: int, job: BuildJob) -> None:
        self.jobs.append(job.label)
        if isinstance(job, TraceJob):
            row = find_row(self._source, job)
            assert row is not None
            for digest in row.digests():
                self._store.objects.put_bytes(self._source.objects.read(digest))
            record(self._store, job.key.hex, row)
        else:
            assert isinstance(job, CompileJob)
            row = unit_row(self._store, job.label, job.label.encode())
            record(self._store, job.key, row)
        self._done.append(Done(ticket, Built(row, is_new=True)))

    def wait(self, timeout_seconds: float) -> list[Done]:
        if not self._done:
            threading.Event().wait(0.01)
        return super().wait(timeout_seconds)


@pytest.fixture
def traced(tmp_path: Path) -> Store:
    """What tracing would give."""
    store = Store.open(tmp_path / "traced")
    seed(store, tiny_spec(), ENTRIES, LABELS)
    return store


Build = Callable[..., tuple[BuildOutcome, list[str], list[str]]]


@pytest.fixture
def build(tmp_path: Path, traced: Store, place: Place) -> Build:
    """Builds into a new store; returns the outcome, the jobs that were done and the warnings."""
    numbers = iter(range(100))

    def build(*, push: bool = False) -> tuple[BuildOutcome, list[str], list[str]]:
        store, warnings = Store.open(tmp_path / f"store {next(numbers)}"), list[str]()
        pool = PoolInPlace(traced, store)
        with RemoteCache(Remote(place.url), store, push=push, warn=warnings.append) as remote:
            plan = make_plan(ENTRIES, tiny_spec(), probe(), store)
            if fetch_missing(plan, store, remote):
                plan = make_plan(ENTRIES, tiny_spec(), probe(), store)
            upload_all(plan, remote)
            outcome = run_plan(plan, tiny_spec(), store, pool, Watch(), remote)
        assert make_plan(ENTRIES, tiny_spec(), probe(), store).is_complete
        assert (outcome.failures, outcome.interrupted) == ((), False)
        return outcome, pool.jobs, warnings

    return build


UNITS = ["head b", "head c", "layer a"]


def test_what_one_builder_pushes_the_next_one_does_not_make(build: Build, place: Place) -> None:
    assert sorted(build(push=True)[1])[:3] == UNITS
    outcome, jobs, warnings = build()

    assert (jobs, warnings) == ([], [])
    assert outcome.compiled == ()
    assert len(place.names("records/")) == 5


def test_without_push_nothing_is_uploaded(build: Build, place: Place) -> None:
    build()

    assert place.files == {}


def test_units_that_a_trace_finds_are_fetched_not_compiled(build: Build, traced: Store, place: Place) -> None:
    build(push=True)
    for state in make_plan(ENTRIES, tiny_spec(), probe(), traced).programs:
        del place.files[f"records/{state.key.hex[:2]}/{state.key.hex}.json"]
    key = key_of("head c")
    del place.files[f"records/{key[:2]}/{key}.json"]
    place.seconds = 0.05

    outcome, jobs, warnings = build()

    assert [label for label in jobs if not label.startswith("trace")] == ["head c"]
    assert len(jobs) == 3
    assert [row.label for row in outcome.compiled] == ["head c"]
    assert warnings == []


@pytest.mark.parametrize("num_answers", [0, 1, 2, 4, 6, 9])
def test_a_remote_that_is_lost_at_any_time_costs_the_rest_alone(
    build: Build, place: Place, num_answers: int
) -> None:
    build(push=True)
    place.answers.clear()

    def die(*_: str) -> None:
        if len(place.answers) > num_answers:
            raise ConnectionResetError("reset")

    place.fault = die

    outcome, jobs, warnings = build(push=True)

    assert len(set(jobs)) == len(jobs)
    assert {row.label for row in outcome.compiled} == set(jobs) & set(UNITS)
    assert 1 <= len(warnings) <= 2  # That it is asked no more, and that nothing more is uploaded.


def test_a_store_that_cannot_take_what_comes_ends_the_run(
    build: Build, traced: Store, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(push=True)
    for state in make_plan(ENTRIES, tiny_spec(), probe(), traced).programs:
        del place.files[f"records/{state.key.hex[:2]}/{state.key.hex}.json"]
    place.seconds = 0.05

    def fill(*_: object) -> Iterator[bytes]:
        raise StoreError("no room")

    monkeypatch.setattr(Remote, "chunks", fill)

    with pytest.raises(StoreError, match="no room"):
        build()
