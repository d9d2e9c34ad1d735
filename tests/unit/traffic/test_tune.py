from __future__ import annotations

from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.errors import SpecError
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json, spec_tables
from aotgaudi.traffic.cost import WorkModel, device_of
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace
from aotgaudi.traffic.tune import Tuner
from tests.specs import SMALL_CONFIG, spec_of

LIMITS = {
    "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 512, "block_size": 16, "num_blocks": 200,
}  # fmt: skip


def served(**changes: object) -> BuildSpec:
    return spec_of(config=SMALL_CONFIG, limits={**LIMITS, **changes})


def work_of(spec: BuildSpec) -> WorkModel:
    return WorkModel.of(spec, device_of(spec))


def traffic(num: int, seed: int = 0) -> Trace:
    random = Random(seed)
    return Trace(
        tuple(sorted(random.random() * num / 50 for _ in range(num))),
        tuple(min(400, 1 + int(random.expovariate(1 / 60))) for _ in range(num)),
        tuple(1 + int(random.expovariate(1 / 30)) for _ in range(num)),
    )


@pytest.fixture(scope="module")
def tuner() -> Tuner:
    spec = served()
    return Tuner(spec, traffic(300), work_of(spec))


def table_of(spec: BuildSpec) -> BucketTable:
    return BucketTable.from_entries(enumerate_entries(spec))


def num_steps(spec: BuildSpec) -> int:
    table = table_of(spec)
    return len(table.prompt) + len(table.decode)


@pytest.mark.parametrize("num_entries", [2, 3, 8, 21, 60])
def test_a_tuned_spec_is_closed_within_its_budget(tuner: Tuner, num_entries: int) -> None:
    tuned = tuner.tuned(num_entries)

    assert coverage_of(Manifest.of(tuned)).is_closed
    assert num_steps(tuned) <= num_entries


def test_it_pads_less_than_the_public_table_of_as_many_entries(tuner: Tuner) -> None:
    num_entries = num_steps(tuner.spec)

    today = tuner.predicted(table_of(tuner.spec), "today")
    tuned = tuner.predicted(table_of(tuner.tuned(num_entries)), "tuned")

    assert tuned.needed == today.needed
    assert tuned.work - tuned.needed < 0.7 * (today.work - today.needed)


def test_more_entries_never_cost_more(tuner: Tuner) -> None:
    works = [tuner.predicted(table_of(tuner.tuned(num)), "tuned").work for num in (2, 4, 8, 16, 32, 64)]

    assert works == sorted(works, reverse=True)


def test_the_same_trace_gives_the_same_buckets(tuner: Tuner) -> None:
    again = Tuner(tuner.spec, tuner.trace, tuner.work)

    assert again.tuned(20) == tuner.tuned(20)


def test_a_tuned_spec_is_written_and_read_back(tuner: Tuner) -> None:
    tuned = tuner.tuned(12)

    assert spec_from_json(tuned.to_json()) == tuned
    assert spec_from_json(spec_tables(tuned)) == tuned


def test_what_is_replayed_in_the_tuned_table_is_near_what_was_predicted(tuner: Tuner) -> None:
    tuned = tuner.tuned(30)

    replayed, _ = tuner.replayed(table_of(tuned), "replayed")

    assert replayed.num_entries == num_steps(tuned)
    assert replayed.work == pytest.approx(tuner.predicted(table_of(tuned), "predicted").work, rel=0.1)


@pytest.mark.parametrize("num_entries", [1, 401])
def test_a_budget_out_of_range_is_refused(tuner: Tuner, num_entries: int) -> None:
    with pytest.raises(SpecError, match=r"--entries: is \d+ \(2 to 400\)"):
        tuner.tuned(num_entries)


@pytest.mark.parametrize(
    ("bucketing", "problem"),
    [
        ({"contiguous_pa": True}, "bucketing.contiguous_pa: is True, which cannot be tuned"),
        ({"merged_prefill": True}, "bucketing.merged_prefill: is True"),
        ({"num_speculative_tokens": 2}, "bucketing.num_speculative_tokens: is 2"),
        ({"strategy": "unified", "version": "vllm-gaudi@v0.16.0"}, "bucketing.strategy: is 'unified'"),
    ],
)
def test_a_server_whose_steps_are_others_is_refused(bucketing: dict[str, object], problem: str) -> None:
    spec = spec_of(config=SMALL_CONFIG, limits=LIMITS, bucketing=bucketing)

    with pytest.raises(SpecError) as caught:
        Tuner(spec, traffic(5), work_of(spec))

    assert str(caught.value).startswith(problem)


limits_of_servers = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 12),
        "max_num_batched_tokens": st.integers(16, 100),
        "max_model_len": st.integers(17, 200),
        "num_blocks": st.integers(13, 60),
    }
)


@settings(max_examples=40)
@given(limits_of_servers, st.integers(2, 25), st.integers(0, 10**6), st.sampled_from([5, 16]))
def test_no_traffic_forms_a_step_without_an_entry(
    limits: dict[str, int], num_entries: int, seed: int, query_step: int
) -> None:
    spec, first = served(**limits), traffic(20, seed)
    assume(min(first.prompt_tokens) < limits["max_model_len"])
    tuned = Tuner(spec, first, work_of(spec), query_step).tuned(num_entries)
    table = table_of(tuned)

    assert coverage_of(Manifest.of(tuned)).is_closed
    other = traffic(60, seed + 1)
    replayed = replay(other, spec.limits, table, work_of(spec).seconds)
    for needs, entry in replayed.steps:
        assert all(least <= most for least, most in zip(needs.row(), entry.row(), strict=True))
