"""Where the time of a build went: one line, and JSON."""

from __future__ import annotations

from aotgaudi.cli.build_cache import build_time_line
from aotgaudi.compile.run import BuildOutcome
from aotgaudi.phases import Phase

PHASES = (Phase("enumerate", 0.0, 0.125), Phase("run", 0.5, 10.5), Phase("seal", 10.5, 11.0))


def test_the_run_says_what_its_workers_did() -> None:
    outcome = BuildOutcome(seconds=10.0, num_workers=2, worker_seconds={"trace": 4.0, "compile": 15.0})

    assert build_time_line(PHASES, outcome) == (
        "time: 11.0 s: enumerate 0.1, run 10.0 (2 workers: tracing 4.0, compiling 15.0, idle 1.0), seal 0.5"
    )
