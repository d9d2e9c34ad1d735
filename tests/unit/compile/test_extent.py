"""How much is built: in order of importance, until the time is over, and never less than can be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.part import proved_part
from aotgaudi.compile.pipeline import build
from aotgaudi.compile.run import Deadline, Extent, Progress, Watch, run_plan
from aotgaudi.compile.workers import LocalPool
from aotgaudi.errors import BuildInterruptedError, CompileError
from aotgaudi.manifest.importance import Importance
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.store.store import Store
from tests.specs import spec_tables
from tests.workload import journaled, key_of, seed, seeded_plan, tiny_spec

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
MANIFEST = Manifest.of(
    spec_from_json(
        spec_tables(sampler={"settings": [GREEDY]}, defrag={"enabled": False}, target={"backend": "fake"})
    )
)
IMPORTANCE = Importance(MANIFEST)
NUM_LEAST = len(IMPORTANCE.tier("least"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Every program of `MANIFEST` is traced, each of one unit of its own."""
    store = Store.open(tmp_path / "store")
    seed(store, MANIFEST.spec, MANIFEST.entries, [(f"layer {n}",) for n in range(len(MANIFEST.entries))])
    return store


def test_in_order_the_units_of_a_program_come_before_those_of_the_next(store: Store, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    target = journaled(journal)
    labels = [("swap a", "head b"), ("layer c", "head b"), ("layer d",)]
    plan = seeded_plan(store, labels, target)

    run_plan(plan, tiny_spec(), store, LocalPool(1, store.root / "toolcache"), Watch(), in_order=True)

    order = ["head b", "swap a", "layer c", "layer d"]
    assert journal.read_text(encoding="ascii").split() == [key_of(label, target) for label in order]


def test_a_budget_that_is_over_at_once_still_gives_what_can_be_served_and_a_later_build_the_rest(
    store: Store, tmp_path: Path
) -> None:
    extent = Extent(IMPORTANCE.order, NUM_LEAST, seconds=0.0)

    first = build(MANIFEST, tmp_path / "part", store=store, jobs=1, extent=extent)

    bundle = open_bundle(tmp_path / "part")
    part = proved_part(bundle, "whole")
    assert part is not None
    assert first.outcome.interrupted
    assert set(bundle.receipt.programs) >= {entry.id for entry in IMPORTANCE.tier("least")}
    assert len(bundle.receipt.programs) < len(MANIFEST.entries)
    assert part.limits.max_model_len == 32

    second = build(MANIFEST, tmp_path / "whole", store=store, jobs=1)

    whole = open_bundle(tmp_path / "whole")
    assert whole.receipt.part is None
    assert set(whole.receipt.programs) == {entry.id for entry in MANIFEST.entries}
    keys = [row.label for row in (*first.outcome.compiled, *second.outcome.compiled)]
    assert len(keys) == len(set(keys))


def test_a_budget_that_is_long_enough_gives_the_whole(store: Store, tmp_path: Path) -> None:
    extent = Extent(IMPORTANCE.order, NUM_LEAST, seconds=3600.0)

    result = build(MANIFEST, tmp_path / "out", store=store, jobs=2, extent=extent)

    assert not result.outcome.interrupted
    assert open_bundle(tmp_path / "out").receipt.part is None


def test_a_budget_that_ends_in_between_gives_a_beginning_of_the_order(store: Store, tmp_path: Path) -> None:
    """The time is over when so many units are done, whatever the machine does meanwhile."""
    seen: list[Progress] = []
    extent = Extent(IMPORTANCE.first(NUM_LEAST + 3))

    build(MANIFEST, tmp_path / "out", store=store, jobs=1, extent=extent, on_progress=seen.append)

    programs = open_bundle(tmp_path / "out").receipt.programs
    assert {entry.id for entry in extent.entries} <= set(programs)
    assert seen[-1].num_done == seen[-1].num_total


def test_the_same_tier_gives_the_same_bytes_whatever_else_the_store_has(store: Store, tmp_path: Path) -> None:
    extent = Extent(IMPORTANCE.tier("covering"))
    first = build(MANIFEST, tmp_path / "one", store=store, jobs=1, extent=extent)
    build(MANIFEST, store=store, jobs=1)

    second = build(MANIFEST, tmp_path / "two", store=store, jobs=1, extent=extent)

    assert second.outcome.compiled == ()
    assert first.index == second.index


def test_a_stop_by_a_person_is_no_end_of_the_budget(store: Store, tmp_path: Path) -> None:
    extent = Extent(IMPORTANCE.order, NUM_LEAST, seconds=3600.0)

    with pytest.raises(BuildInterruptedError, match="resumable"):
        build(
            MANIFEST,
            tmp_path / "out",
            store=store,
            jobs=1,
            extent=extent,
            on_progress=Watch(should_stop=lambda: True),
        )

    assert not (tmp_path / "out").exists()


def test_a_unit_that_fails_is_an_error_within_a_budget_too(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    seed(store, MANIFEST.spec, MANIFEST.entries, [("layer !fail",)])
    extent = Extent(IMPORTANCE.order, NUM_LEAST, 3600.0)

    with pytest.raises(CompileError, match="told to fail"):
        build(MANIFEST, tmp_path / "out", store=store, jobs=1, extent=extent)

    assert not (tmp_path / "out").exists()


def test_a_deadline_shows_and_stops_as_what_it_is_made_of() -> None:
    seen: list[Progress] = []
    is_stopped = False
    deadline = Deadline(Watch(seen.append, lambda: is_stopped), 3600.0)

    with deadline:
        deadline.show(Progress(1, 2, 0.0, ()))
    assert len(seen) == 1
    assert not deadline.should_stop()

    is_stopped = True
    assert deadline.should_stop()
    assert not deadline.is_over
    assert Deadline(Watch(), 0.0).is_over
