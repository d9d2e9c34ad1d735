"""Phases: begin and end of each, on any thread, overlapping as they will."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.phases import Phase, Phases, listed, since_process_start


def ticking(times: list[float]) -> Callable[[], float]:
    ticks: Iterator[float] = iter(times)
    return lambda: next(ticks)


def test_a_phase_has_a_beginning_an_end_and_a_length() -> None:
    phases = Phases(ticking([1.0, 3.5]))

    with phases.time("verify"):
        pass

    assert phases.done == (Phase("verify", 1.0, 3.5),)
    assert phases.done[0].seconds == 2.5


def test_phases_may_overlap_and_are_listed_by_their_beginnings() -> None:
    phases = Phases(ticking([0.0, 1.0, 2.0, 3.0]))

    with phases.time("import"), phases.time("weights"):
        pass

    assert listed(phases.done) == "import 0.00-3.00, weights 1.00-2.00"


def test_what_fails_is_not_kept() -> None:
    phases = Phases()

    with pytest.raises(ValueError, match="gone"), phases.time("verify"):
        raise ValueError("gone")

    assert phases.done == ()


def test_what_returns_from_within_is_kept() -> None:
    phases = Phases()

    def plan() -> None:
        with phases.time("plan"):
            return

    plan()

    assert [phase.name for phase in phases.done] == ["plan"]


def test_the_first_phase_may_have_begun_before_anybody_could_time_it() -> None:
    phases = Phases(ticking([0.25]))

    phases.add("process", 0.0)

    assert phases.done == (Phase("process", 0.0, 0.25),)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=8))
def test_any_number_of_threads_lose_no_phase(spans: list[tuple[float, float]]) -> None:
    phases = Phases()
    threads = [
        threading.Thread(target=phases.add, args=(str(number), begin))
        for number, (begin, _) in enumerate(spans)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(phase.name for phase in phases.done) == sorted(map(str, range(len(spans))))
    assert [phase.begin for phase in phases.done] == sorted(begin for begin, _ in spans)


def test_a_process_knows_how_long_ago_it_was_started() -> None:
    clock = since_process_start()
    before, again = clock(), clock()

    assert 0 < before <= again
    assert before <= time.clock_gettime(time.CLOCK_BOOTTIME)
