"""A trace in a report: what the replay did, added up by cell and by entry, and nothing lost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.compute import Given, report_of
from aotgaudi.report.html import number_at
from aotgaudi.report.page import report_page
from aotgaudi.report.traffic import steps_of_trace
from aotgaudi.report.values import Report
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace
from tests.specs import spec_of
from tests.unit.report.test_page import MARKS, Elements, numbers


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
    found = report.trace
    assert found is not None
    assert (found.num_steps, found.num_requests) == (replayed.num_steps, replayed.num_requests)
    assert found.num_entries_used == len({entry for _, entry in replayed.steps})
    cells = [cell.traffic for plane in report.planes for cell in plane.cells if cell.traffic]
    assert sum(one.num_steps for one in cells) == replayed.num_steps
    done: Counter[str] = Counter()
    for (needs, entry), count in replayed.steps.items():
        done["useful"] += count * model.work(needs) // 10**9
        done["padded"] += count * model.work(entry) // 10**9
    assert sum(one.useful for one in cells) == pytest.approx(done["useful"]) == pytest.approx(found.useful)
    assert sum(one.padded for one in cells) == pytest.approx(done["padded"]) == pytest.approx(found.padded)
    assert sum(one.share for one in cells) == pytest.approx(
        1 if done["padded"] > done["useful"] else 0, abs=1e-3
    )
    assert found.factor >= 1


def test_the_most_wasteful_entries_come_first() -> None:
    report, _ = reported([(0, 17, 3), (0, 90, 9), (3, 33, 1)])

    assert report.trace is not None
    waste = [one.traffic.padded - one.traffic.useful for one in report.trace.wasteful]
    assert waste == sorted(waste, reverse=True)
    assert waste[0] > 0


def test_the_page_shows_the_trace_in_place_of_all_steps() -> None:
    report, _ = reported([(0, 17, 3), (0, 90, 9), (3, 33, 1)])
    document = json.loads(report.model_dump_json(by_alias=True))

    page = report_page(report)

    found = list(numbers(page))
    assert {"trace.num_steps", "trace.factor", "planes.0.traffic.num_steps"} <= {
        place for place, _, _ in found
    }
    assert all(json.loads(value) == number_at(document, place) for place, value, _ in found)
    marks = Counter(a["data-path"] for tag, a, _ in Elements(page).found if tag in MARKS and "data-path" in a)
    for index, plane in enumerate(report.planes):
        for number, cell in enumerate(plane.cells):
            drawn = bool(cell.num_steps) + (cell.traffic is not None)
            assert marks[f"planes.{index}.cells.{number}"] == drawn


def test_without_prompts_and_decodes_nothing_can_be_replayed() -> None:
    eager = Manifest.of(spec_of(target={"backend": "hpu", "execution_mode": "eager"}))

    with pytest.raises(SpecError, match="needs prompt and decode entries"):
        steps_of_trace("x.csv", Trace((0.0,), (5,), (5,)), eager, Tokens(), "tokens")
