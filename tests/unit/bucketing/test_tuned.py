from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import VERSIONS, find_strategy
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.bucket_file import bucket_file_of
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from tests.specs import spec_of

BUCKETS = {"prompts": [[16, 0], [16, 3], [32, 8]], "decodes": [[1, 4], [2, 3], [2, 16]]}


def tuned(**changes: Any) -> Any:
    return spec_of(bucketing={"strategy": "tuned", "tuned": {**BUCKETS, **changes}})


def test_the_entries_are_those_that_are_listed() -> None:
    entries = enumerate_entries(tuned())

    assert [one for one in entries if isinstance(one, PromptEntry)] == [
        PromptEntry(1, 16, 0), PromptEntry(1, 16, 3), PromptEntry(1, 32, 8),
    ]  # fmt: skip
    assert [one for one in entries if isinstance(one, DecodeEntry)] == [
        DecodeEntry(1, 1, 4), DecodeEntry(2, 1, 3), DecodeEntry(2, 1, 16),
    ]  # fmt: skip


def test_a_list_that_is_not_closed_is_closed_as_any_other() -> None:
    spec = tuned(prompts=[[16, 0]], decodes=[[1, 1]])

    assert coverage_of(Manifest.of(spec)).is_closed


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_the_strategy(version: str) -> None:
    spec = tuned()
    strategy = find_strategy(version, "tuned")
    inputs = BucketingInputs.from_spec(spec.limits, spec.bucketing)

    assert strategy.prompt_table(inputs) == ((1, 16, 0), (1, 16, 3), (1, 32, 8))
    assert (
        strategy.decode_table(inputs)
        == strategy.decode_seed_table(inputs)
        == ((1, 1, 4), (2, 1, 3), (2, 1, 16))
    )


@pytest.mark.parametrize(
    ("bucketing", "problem"),
    [
        ({"strategy": "tuned"}, "bucketing.tuned: is missing"),
        ({"strategy": "linear", "tuned": BUCKETS}, "bucketing.tuned: is given with strategy 'linear'"),
        ({"strategy": "tuned", "tuned": {**BUCKETS, "prompts": []}}, "bucketing.tuned.prompts: is empty"),
        (
            {"strategy": "tuned", "tuned": {**BUCKETS, "decodes": [[2, 3], [1, 4]]}},
            "bucketing.tuned.decodes: is not in order",
        ),
        (
            {"strategy": "tuned", "tuned": {**BUCKETS, "decodes": [[1, 4], [1, 4]]}},
            "bucketing.tuned.decodes: is not in order",
        ),
        (
            {"strategy": "tuned", "tuned": {**BUCKETS, "decodes": [[1, 0]]}},
            "bucketing.tuned.decodes: has [1, 0]",
        ),
        (
            {"strategy": "tuned", "tuned": {**BUCKETS, "prompts": [[0, 4]]}},
            "bucketing.tuned.prompts: has [0, 4]",
        ),
    ],
)
def test_a_wrong_table_is_refused(bucketing: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(bucketing=bucketing)

    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        ({"prompts": [[33, 0]]}, "has 33, more than max_num_batched_tokens"),
        ({"prompts": [[16, 9]]}, "has 9, more than the blocks of max_model_len"),
        ({"decodes": [[3, 4]]}, "has 3, more than max_num_seqs"),
        ({"decodes": [[1, 25]]}, "has 25, more than num_blocks"),
    ],
)
def test_buckets_that_no_step_needs_are_refused(buckets: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        enumerate_entries(tuned(**buckets))


def test_a_vllm_server_is_told_to_read_them_from_a_file() -> None:
    with pytest.raises(SpecError, match=r"bucketing\.strategy: is 'tuned', with engine 'vllm'"):
        spec_of(bucketing={"strategy": "tuned", "tuned": BUCKETS}, scheduler={"engine": "vllm"})


def test_the_buckets_are_given_to_such_a_server_as_a_file() -> None:
    found = bucket_file_of(tuned())

    assert found.spec.bucketing.strategy == "file"
    assert {(1, 16, 0), (1, 16, 3)} <= set(found.prompt)
    assert {(1, 1, 4), (2, 1, 3), (2, 1, 16)} <= set(found.decode)
