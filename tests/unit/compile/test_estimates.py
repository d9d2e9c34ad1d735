"""Estimates: the most similar unit's time, else the table's; and the order that follows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.backends.fake.probe import probe
from aotgaudi.compile.plan import OTHER_SECONDS, UNIT_SECONDS, Estimates, Part, TimeLeft, read_estimates
from aotgaudi.store.store import Store
from tests.workload import execute, seeded_plan

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
    outcome = execute(store, seeded_plan(store, [tuple(label_seconds)]), 1)
    for key, row in zip(list(store.actions), store.actions.get_many(store.actions).values(), strict=True):
        if row.get("label") in label_seconds:
            changed = {**row, "compile_seconds": label_seconds[str(row["label"])]}
            store.actions.discard(key)
            store.actions.put(key, changed)
    assert len(outcome.compiled) == len(label_seconds)


@pytest.mark.process
def test_earlier_records_of_the_same_backend_and_machine_tell_and_others_do_not(store: Store) -> None:
    slower(store, {"swap 1": 90.0, "head 1": 0.5})

    mine = read_estimates(store, probe())
    others = read_estimates(store, probe().model_copy(update={"machine": "another"}))

    assert (mine.unit_seconds("swap 2"), mine.unit_seconds("head 2")) == (90.0, 0.5)
    assert others.seen == {}


@pytest.mark.process
def test_a_plan_and_its_order_follow_the_records(store: Store) -> None:
    slower(store, {"swap 1": 90.0, "head 1": 0.5})

    plan = seeded_plan(store, [("head 2", "layer x", "swap 2")])
    assert plan.estimate_seconds(2) == pytest.approx((90.0 + 0.5 + UNIT_SECONDS["layer"]) / 2)

    outcome = execute(store, plan, 1)
    assert [row.label for row in outcome.compiled] == ["swap 2", "layer x", "head 2"]


@pytest.mark.process
def test_a_complete_plan_reads_no_earlier_record(store: Store) -> None:
    slower(store, {"swap 1": 90.0})

    assert seeded_plan(store, [("swap 1",)]).estimates.seen == {}


UNIT = (Part("layer", 7.0),)


@dataclass
class Simulation:
    """Equal jobs on some workers, which take other seconds than was estimated; looked at 20 times a job."""

    num_jobs: int
    num_workers: int
    true_seconds: float
    left: TimeLeft = field(default_factory=TimeLeft)
    said: list[tuple[int, float, float]] = field(default_factory=list)
    """Jobs done, what was said, what was true."""

    def run(self) -> Simulation:
        step_seconds = self.true_seconds / 20
        waiting, running, done, now = self.num_jobs, [], 0, 0.0
        while done < self.num_jobs:
            while waiting and len(running) < self.num_workers:
                running.append(now)
                waiting -= 1
            seconds = self.left.seconds(
                waiting=[UNIT] * waiting,
                running=[(UNIT, now - begun) for begun in running],
                num_workers=self.num_workers,
                event=done,
            )
            rest = waiting * self.true_seconds + sum(self.true_seconds - (now - begun) for begun in running)
            self.said.append((done, seconds, rest / self.num_workers))
            now += step_seconds
            for begun in [begun for begun in running if now - begun >= self.true_seconds]:
                running.remove(begun)
                done += 1
                self.left.learn(UNIT[0], now - begun)
        return self


@pytest.mark.parametrize("true_seconds", [0.5, 7.0, 30.0, 90.0])
def test_the_time_left_falls_between_events_is_never_negative_and_never_jumps_wildly(
    true_seconds: float,
) -> None:
    said = Simulation(40, 2, true_seconds).run().said

    for (done, before, _), (done_later, after, _) in itertools.pairwise(said):
        assert after > 0
        if done == done_later:
            assert after < before
        else:
            num_events = done_later - done
            assert after <= max(1.25 * before, before + 10.0), (num_events, before, after)


@pytest.mark.parametrize("true_seconds", [1.0, 30.0, 90.0])
def test_the_time_left_learns_what_this_runs_jobs_take(true_seconds: float) -> None:
    said = Simulation(60, 2, true_seconds).run().said

    first = next(seconds / true for done, seconds, true in said if done == 0)
    assert not 0.8 < first < 1.25, "the estimate alone is wrong"
    for done, seconds, true in said:
        if 20 <= done <= 40:
            assert seconds == pytest.approx(true, rel=0.25)


def test_a_job_that_is_late_still_has_some_time_left_and_ever_less() -> None:
    left = TimeLeft()
    said = [
        left.seconds(waiting=[], running=[(UNIT, float(elapsed))], num_workers=4, event=0)
        for elapsed in range(60)
    ]

    assert said[0] == 7.0
    assert said == sorted(said, reverse=True)
    assert said[-1] > 0
    assert left.seconds(waiting=[], running=[], num_workers=4, event=1) == 0.0


def test_what_is_learnt_of_one_kind_counts_for_it_and_a_little_for_others() -> None:
    left, head = TimeLeft(), Part("head", 5.0)
    for _ in range(20):
        left.learn(Part("layer", 7.0), 70.0)
        left.learn(head, 5.0)

    def seconds(part: Part, event: int) -> float:
        return left.seconds(waiting=[(part,)], running=[], num_workers=1, event=event)

    assert seconds(Part("layer", 7.0), 1) > 60
    assert TimeLeft().seconds(waiting=[(head,)], running=[], num_workers=1, event=0) == 5.0
    assert seconds(head, 2) < 7
