"""What a trace says of a manifest's entries: where its steps run, and which limits most of its requests fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.subset import Importance, largest_subset
from aotgaudi.traffic.replay import traffic_of
from aotgaudi.traffic.trace import Trace
from tests.specs import spec_of

MANIFEST = Manifest.of(spec_of(limits={"max_num_seqs": 4, "num_blocks": 32}))
TABLE = BucketTable.from_entries(MANIFEST.entries)


def trace_of(*requests: tuple[int, int]) -> Trace:
    prompts, answers = zip(*requests, strict=True)
    return Trace(tuple(map(float, range(len(requests)))), prompts, answers)


def test_steps_count_half_where_all_run_together_and_half_where_each_is_alone() -> None:
    traffic = traffic_of(MANIFEST, trace_of(*[(10, 5)] * 8))

    sizes = {entry.batch_size for entry in traffic.steps if isinstance(entry, DecodeEntry)}
    assert {1, 4} <= sizes
    assert TABLE.find_prompt(1, 10, 0) in traffic.steps
    assert sum(traffic.steps.values()) == pytest.approx(2.0)


def test_nine_of_ten_requests_fit_the_limits() -> None:
    requests = [(10, 5)] * 9 + [(100, 20)]

    assert traffic_of(MANIFEST, trace_of(*requests)).limits == MANIFEST.spec.limits.model_copy(
        update={"max_model_len": 15}
    )
    assert traffic_of(MANIFEST, trace_of(*requests[1:])).limits == MANIFEST.spec.limits.model_copy(
        update={"max_model_len": 120}
    )


def test_requests_longer_than_the_limits_are_no_reason_to_raise_them() -> None:
    traffic = traffic_of(MANIFEST, trace_of((100, 1000)))

    assert traffic.limits == MANIFEST.spec.limits


def test_a_trace_that_does_not_fit_is_one_line() -> None:
    with pytest.raises(SpecError, match="no prompt that fits"):
        traffic_of(MANIFEST, trace_of((1000, 1)))


def test_a_long_trace_is_thinned_evenly() -> None:
    half = [(20, 100)] * 3000
    traffic = traffic_of(MANIFEST, trace_of(*half, *[(100, 3)] * 3000))

    assert any(isinstance(entry, PromptEntry) and entry.num_ctx_blocks >= 4 for entry in traffic.steps)


@given(st.lists(st.tuples(st.integers(1, 127), st.integers(0, 40)), min_size=1, max_size=12))
def test_a_hot_tier_serves_most_of_the_traffic(requests: list[tuple[int, int]]) -> None:
    traffic = traffic_of(MANIFEST, trace_of(*requests))

    part = largest_subset(MANIFEST, Importance(MANIFEST, traffic).tier("hot"), "whole")

    assert part is not None
    longest = MANIFEST.spec.limits.max_model_len
    served = sum(min(sum(request), longest) <= part.limits.max_model_len for request in requests)
    assert 10 * served >= 9 * len(requests)
