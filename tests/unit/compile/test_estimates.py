"""Estimates: a unit's time on record, else the mean of its kind, else the table's; and the order that follows."""

from __future__ import annotations

import pytest

from aotgaudi.backends.fake import probe
from aotgaudi.compile.plan import OTHER_SECONDS, UNIT_SECONDS, Estimates, TimeLeft, Work, read_estimates
from aotgaudi.store.store import Store
from tests.workload import execute, seeded_plan

SEEN = Estimates.of([("layer (decode, 1)", 5.0), ("layer (decode, 64)", 9.0), ("defrag (defrag, 4)", 1.0)])


@pytest.mark.parametrize(
    ("label", "seconds"),
    [
        ("layer (decode, 64)", 9.0),
        ("layer (prompt, 16, 2048, 9)", 7.0),
        ("defrag (defrag, 4096)", 1.0),
        ("head (decode, 1, 1, 128)", UNIT_SECONDS["head"]),
        ("something else", OTHER_SECONDS),
        ("", OTHER_SECONDS),
    ],
)
def test_a_unit_takes_what_it_took_else_what_its_kind_took_else_what_the_table_says(
    label: str, seconds: float
) -> None:
    assert SEEN.unit_seconds(label) == seconds


def slower(store: Store, label_seconds: dict[str, float]) -> None:
    """Builds units with these labels and has the store believe that they took so long."""
    outcome = execute(store, seeded_plan(store, [tuple(label_seconds)]), 1)
    for key, row in zip(list(store.actions), store.actions.get_many(store.actions).values(), strict=True):
        if row.get("label") in label_seconds:
            store.actions.discard(key)
            store.actions.put(key, {**row, "compile_seconds": label_seconds[str(row["label"])]})
    assert len(outcome.compiled) == len(label_seconds)


@pytest.mark.process
def test_a_plan_and_its_order_follow_the_records_of_this_backend_and_machine(store: Store) -> None:
    slower(store, {"swap 1": 90.0, "head 1": 0.5})
    another = probe().model_copy(update={"machine": "another"})

    plan = seeded_plan(store, [("head 2", "layer x", "swap 2")])
    assert plan.estimate_seconds(2) == pytest.approx((90.0 + 0.5 + UNIT_SECONDS["layer"]) / 2)
    assert read_estimates(store, another) == Estimates()
    assert seeded_plan(store, [("swap 1",)]).estimates == Estimates(), "complete: reads no record for them"

    outcome = execute(store, plan, 1)
    assert [row.label for row in outcome.compiled] == ["swap 2", "layer x", "head 2"]


def test_the_time_left_is_that_of_the_jobs_shared_by_the_workers_and_corrected_by_those_that_ended() -> None:
    left, unit, trace = TimeLeft(), Work(6.0), Work(4.0, later_seconds=20.0)

    assert left.seconds(waiting=[], running=[], num_workers=4) == 0.0
    assert left.seconds(waiting=[unit] * 3, running=[(unit, 2.0)], num_workers=2) == 11.0
    assert left.seconds(waiting=[trace], running=[], num_workers=4) == 24.0
    assert left.seconds(waiting=[], running=[(unit, 60.0)], num_workers=4) == 0.0, "late"
    for _ in range(100):
        left.learn(unit, 60.0)
    assert left.seconds(waiting=[unit], running=[], num_workers=1) == pytest.approx(60.0, rel=0.1)
