"""A trace in a report: what the replay did, added up by cell and by entry, and nothing lost."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.compute import Given, Report, report_of, steps_of_trace
from aotgaudi.report.html import number_at
from aotgaudi.report.page import report_page
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace
from tests.specs import spec_of
from tests.unit.report.test_page import numbers


@dataclass(frozen=True)
class Tokens:
    """Work in tokens that are computed or read, a thousand million of them each, and a second for 64."""

    def work(self, entry: StepEntry) -> int:
        size = 16 * (entry.num_ctx_blocks if isinstance(entry, PromptEntry) else entry.num_blocks)
        return 10**9 * entry.batch_size * entry.query_len + 10**9 * size

    def seconds(self, entry: StepEntry) -> float:
        return self.work(entry) / 64e9


MANIFEST = Manifest.of(spec_of())
traces = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 130), st.integers(0, 40)), min_size=1, max_size=12
)


def reported(rows: list[tuple[int, int, int]]) -> tuple[Report, Trace]:
    trace = Trace(*map(tuple, zip(*sorted(rows), strict=True)))  # type: ignore[arg-type]
    traced = steps_of_trace("x.csv", trace, MANIFEST, Tokens(), "tokens")
    return report_of(Given(path="x", kind="spec", manifest=MANIFEST, unknown="", traced=traced)), trace


@given(traces)
def test_nothing_of_the_replay_is_lost(rows: list[tuple[int, int, int]]) -> None:
    if min(prompt for _, prompt, _ in rows) >= 128:
        return
    model = Tokens()

    report, trace = reported(rows)

    table = BucketTable.from_entries(MANIFEST.entries)
    replayed = replay(trace, MANIFEST.spec.limits, table, model.seconds)
    found = report.document["trace"]
    assert (found["num_steps"], found["num_requests"]) == (replayed.num_steps, replayed.num_requests)
    assert found["num_entries_used"] == len({entry for _, entry in replayed.steps})
    cells = [cell for heat_map in report.heat_maps for cell in heat_map.cells]
    assert sum(cell.num_traced or 0 for cell in cells) == replayed.num_steps
    assert all(cell.padding is None or cell.padding >= 1 for cell in cells)
    useful = sum(count * model.work(needs) for (needs, _), count in replayed.steps.items())
    padded = sum(count * model.work(entry) for (_, entry), count in replayed.steps.items())
    assert found["factor"] == pytest.approx(padded / useful, abs=1e-4)


def test_the_page_shows_the_trace() -> None:
    report, _ = reported([(0, 17, 3), (0, 90, 9), (3, 33, 1)])

    found = {place: json.loads(value) for place, value, _ in numbers(report_page(report))}

    assert {"trace.num_steps", "trace.factor"} <= found.keys()
    assert all(value == number_at(report.document, place) for place, value in found.items())
    assert "no step of the trace" in report_page(report)


def test_without_prompts_and_decodes_nothing_can_be_replayed() -> None:
    eager = Manifest.of(spec_of(target={"backend": "hpu", "execution_mode": "eager"}))

    with pytest.raises(SpecError, match="needs prompt and decode entries"):
        steps_of_trace("x.csv", Trace((0.0,), (5,), (5,)), eager, Tokens(), "tokens")
