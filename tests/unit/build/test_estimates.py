"""Estimates: the most similar unit's time, else the table's; and the order that follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.backends.fake.probe import probe
from aotgaudi.build.estimates import OTHER_SECONDS, UNIT_SECONDS, Estimates, read_estimates
from aotgaudi.build.executor import Executor
from aotgaudi.store.store import Store
from tests.unit.build.seeding import seeded_plan, tiny_spec

SEEN = Estimates.of(
    [
        ("layer (decode, 1, 1, 128)", 5.0),
        ("layer (decode, 64, 1, 4096)", 9.0),
        ("layer (prompt, 1, 256, 0)", 7.5),
        ("defrag (defrag, 4)", 1.0),
    ]
)


@pytest.mark.parametrize(
    ("label", "seconds"),
    [
        ("layer (decode, 2, 1, 128)", 5.0),
        ("layer (decode, 32, 1, 2048)", 9.0),
        ("layer (prompt, 16, 2048, 9)", 7.5),
        ("defrag (defrag, 4096)", 1.0),
        ("head (decode, 1, 1, 128)", UNIT_SECONDS["head"]),
        ("layer (unified, 1, 1, 1)", UNIT_SECONDS["layer"]),
        ("something else", OTHER_SECONDS),
        ("", OTHER_SECONDS),
    ],
)
def test_the_nearest_unit_of_the_same_piece_and_kind_of_entry_counts_else_the_table(
    label: str, seconds: float
) -> None:
    assert SEEN.unit_seconds(label) == seconds


@given(st.lists(st.tuples(st.integers(0, 9999), st.floats(0, 1e4)), min_size=1), st.integers(0, 9999))
def test_an_estimate_is_one_of_the_times_seen_and_does_not_depend_on_their_order(
    seen: list[tuple[int, float]], wanted: int
) -> None:
    rows = [(f"layer (decode, {number})", seconds) for number, seconds in seen]

    estimate = Estimates.of(rows).unit_seconds(f"layer (decode, {wanted})")

    assert estimate in {seconds for _, seconds in rows}
    assert estimate == Estimates.of(rows[::-1]).unit_seconds(f"layer (decode, {wanted})")


def slower(store: Store, label_seconds: dict[str, float]) -> None:
    """Builds units with these labels and has the store believe that they took so long."""
    outcome = Executor(store, 1).run(seeded_plan(store, [tuple(label_seconds)]), tiny_spec())
    for key, row in zip(list(store.actions), store.actions.get_many(store.actions).values(), strict=True):
        if row.get("label") in label_seconds:
            changed = {**row, "compile_seconds": label_seconds[str(row["label"])]}
            store.actions.discard(key)
            store.actions.put(key, changed)
    assert len(outcome.compiled) == len(label_seconds)


def test_earlier_records_of_the_same_backend_and_machine_tell_and_others_do_not(store: Store) -> None:
    slower(store, {"swap 1": 90.0, "head 1": 0.5})

    mine = read_estimates(store, probe())
    others = read_estimates(store, probe().model_copy(update={"machine": "another"}))

    assert (mine.unit_seconds("swap 2"), mine.unit_seconds("head 2")) == (90.0, 0.5)
    assert others.seen == {}


def test_a_plan_and_its_order_follow_the_records(store: Store) -> None:
    slower(store, {"swap 1": 90.0, "head 1": 0.5})

    plan = seeded_plan(store, [("head 2", "layer x", "swap 2")])
    assert plan.estimate_seconds(2) == pytest.approx((90.0 + 0.5 + UNIT_SECONDS["layer"]) / 2)

    outcome = Executor(store, 1).run(plan, tiny_spec())
    assert [row.label for row in outcome.compiled] == ["swap 2", "layer x", "head 2"]


def test_a_complete_plan_reads_no_earlier_record(store: Store) -> None:
    slower(store, {"swap 1": 90.0})

    assert seeded_plan(store, [("swap 1",)]).estimates.seen == {}
