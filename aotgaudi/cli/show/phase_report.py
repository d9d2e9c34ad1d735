"""Where the time of a build went, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from aotgaudi.compile.run import BuildOutcome
from aotgaudi.phases import Phase

_WORK = {"trace": "tracing", "compile": "compiling"}


def phase_rows(phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Returns phases as JSON values; seconds since the whole began."""
    return [
        {"phase": phase.name, "begin": round(phase.begin, 4), "end": round(phase.end, 4)} for phase in phases
    ]


def build_time_line(phases: Sequence[Phase], outcome: BuildOutcome) -> str:
    """Returns one line: each phase, and within the run what the workers did.

    ``time: 12.4 s: enumerate 0.1, plan 0.2, run 11.9 (2 workers: tracing 3.1, compiling 19.8, idle 0.9), seal 0.2``
    """
    texts = [
        f"{phase.name} {phase.seconds:.1f}" + (_workers(outcome) if phase.name == "run" else "")
        for phase in phases
    ]
    total = max((phase.end for phase in phases), default=0.0)
    return f"time: {total:.1f} s: {', '.join(texts)}"


def _workers(outcome: BuildOutcome) -> str:
    work = [f"{_WORK[kind]} {seconds:.1f}" for kind, seconds in outcome.worker_seconds.items()]
    idle = outcome.num_workers * outcome.seconds - sum(outcome.worker_seconds.values())
    return f" ({outcome.num_workers} workers: {', '.join([*work, f'idle {max(0.0, idle):.1f}'])})"
