"""Adds up a trace's steps, from a replay through the engine's scheduler, in the cells of a report.

Work is counted as in ``traffic/cost.py``. *Useful* work is that of the smallest shape that a step needs, *padded* work that
of the entry that it ran in. The difference is wasted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.coverage import reachable_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.values import EntryUse, ReportedTrace, Traffic
from aotgaudi.traffic.cost import WorkModel
from aotgaudi.traffic.replay import Replayed, replay
from aotgaudi.traffic.trace import Trace

MOST_WASTEFUL = 12
"""How many of the entries with the most padding are listed."""

_GIGA = 1e9
_DIGITS = 6


@dataclass(frozen=True)
class TracedSteps:
    """A trace in a report, and its steps: prompts by (context blocks, row), decodes by (batch size, blocks)."""

    reported: ReportedTrace
    prompts: Mapping[tuple[int, int], Traffic]
    decodes: Mapping[tuple[int, int], Traffic]


def steps_of_trace(path: str, trace: Trace, manifest: Manifest, model: WorkModel, basis: str) -> TracedSteps:
    """Returns the steps that the server of a manifest forms for a trace that was read from `path`.

    `basis` says in words where the costs of `model` come from.

    Raises:
        SpecError: No request of the trace fits the limits, or the manifest has no prompts and decodes.
        UncoveredStepError: The manifest has a hole, and a step hit it.
    """
    spec = manifest.spec
    table = BucketTable.from_entries((*manifest.of_kind("prompt"), *manifest.of_kind("decode")))
    if not table.prompt or not table.decode:
        raise SpecError("--trace", "needs prompt and decode entries, and there are none", "leave it out")
    replayed = replay(trace, spec.limits, table, model.seconds, spec.scheduler.policy)
    prompts: dict[tuple[int, int], list[_Use]] = defaultdict(list)
    decodes: dict[tuple[int, int], list[_Use]] = defaultdict(list)
    entries: dict[StepEntry, list[_Use]] = defaultdict(list)
    row_of = reachable_of(spec).prompts.row_of
    for (needs, entry), count in replayed.steps.items():
        use = _Use(count, count * model.work(needs), count * model.work(entry))
        entries[entry].append(use)
        if isinstance(needs, PromptEntry):
            prompts[needs.num_ctx_blocks, row_of(needs.query_len)].append(use)
        else:
            decodes[needs.batch_size, needs.num_blocks].append(use)
    waste = sum(use.padded - use.useful for uses in entries.values() for use in uses)
    return TracedSteps(
        reported=_reported(
            path,
            basis,
            replayed,
            {str(entry): _traffic(uses, waste) for entry, uses in entries.items()},
            len(table.prompt) + len(table.decode),
        ),
        prompts={place: _traffic(uses, waste) for place, uses in prompts.items()},
        decodes={place: _traffic(uses, waste) for place, uses in decodes.items()},
    )


@dataclass(frozen=True, slots=True)
class _Use:
    num_steps: int
    useful: int
    padded: int


def _reported(
    path: str, basis: str, replayed: Replayed, entries: Mapping[str, Traffic], num_entries: int
) -> ReportedTrace:
    worst = sorted(entries.items(), key=lambda item: (item[1].useful - item[1].padded, item[0]))
    useful, padded = (sum(getattr(one, name) for one in entries.values()) for name in ("useful", "padded"))
    return ReportedTrace(
        path=path,
        basis=basis,
        num_requests=replayed.num_requests,
        num_refused=replayed.num_refused,
        num_shortened=replayed.num_shortened,
        num_preemptions=replayed.num_preemptions,
        seconds=round(replayed.seconds, 3),
        num_steps=replayed.num_steps,
        num_entries=num_entries,
        num_entries_used=len(entries),
        unit="GFLOP",
        useful=round(useful, _DIGITS),
        padded=round(padded, _DIGITS),
        factor=round(padded / useful, 4) if useful else 1.0,
        wasteful=tuple(EntryUse(entry=entry, traffic=use) for entry, use in worst[:MOST_WASTEFUL]),
    )


def _traffic(uses: Iterable[_Use], waste: int) -> Traffic:
    """Returns the sum of uses. `waste` is the wasted work of the whole trace."""
    rows = tuple(uses)
    useful, padded = sum(row.useful for row in rows), sum(row.padded for row in rows)
    return Traffic(
        num_steps=sum(row.num_steps for row in rows),
        useful=round(useful / _GIGA, _DIGITS),
        padded=round(padded / _GIGA, _DIGITS),
        share=round((padded - useful) / waste, _DIGITS) if waste else 0.0,
    )
