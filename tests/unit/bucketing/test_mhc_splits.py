"""Split counts: the rule against brute force over every token, and each variant."""

from __future__ import annotations

import math
import time
import typing
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.mhc_splits import (
    MHC_RULES,
    MhcBucket,
    MhcInputs,
    StepSplits,
    split_buckets,
    warm_up_buckets,
)
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.spec.hyper_connections import MhcRule

H200 = 132
FLASH, PRO = (4, 4096), (4, 7168)

sizes = st.integers(1, 40_000)
devices = st.integers(1, 300)
budgets = st.integers(1, 5_000)


def by_formula(tokens: int, width: int, num_sms: int) -> int:
    return max(1, min(num_sms // max(math.ceil(tokens / 64), 1), math.ceil(width / 64) // 4))


def by_brute_force(most: int, split: Any) -> list[MhcBucket]:
    """The buckets of `split`, a function of a token count, by looking at every token count."""
    runs = [(value, list(tokens)) for value, tokens in groupby(range(1, most + 1), split)]
    assert len({value for value, _ in runs}) == len(runs), "a value comes back"
    return [MhcBucket(value, tokens[0], tokens[-1]) for value, tokens in runs]


def inputs(most: int, size: tuple[int, int] = FLASH, num_sms: int | None = H200) -> MhcInputs:
    return MhcInputs(most, *size, num_sms)


def representatives(most: int, width: int, num_sms: int) -> tuple[int, ...]:
    """The largest token count of each bucket, descending, as PR #25810 lists them."""
    return tuple(bucket.last_token for bucket in reversed(split_buckets(most, width, num_sms)))


@given(budgets, sizes, devices)
def test_the_buckets_are_those_of_looking_at_every_token(most: int, width: int, num_sms: int) -> None:
    expected = by_brute_force(most, lambda tokens: by_formula(tokens, width, num_sms))

    assert list(split_buckets(most, width, num_sms)) == expected
    assert representatives(most, width, num_sms) == tuple(b.last_token for b in expected[::-1])


@given(st.integers(1, 10**9), sizes, st.integers(1, 4096))
def test_buckets_tile_the_range_and_are_few(most: int, width: int, num_sms: int) -> None:
    buckets = split_buckets(most, width, num_sms)

    assert (buckets[0].first_token, buckets[-1].last_token) == (1, most)
    assert all(a.last_token + 1 == b.first_token for a, b in pairwise(buckets))
    assert all(a.n_splits > b.n_splits for a, b in pairwise(buckets))
    assert len(buckets) <= 2 * math.isqrt(num_sms) + 1
    for bucket in buckets:
        ends = (by_formula(t, width, num_sms) for t in (bucket.first_token, bucket.last_token))
        assert set(ends) == {bucket.n_splits}


@given(st.sampled_from(sorted(MHC_RULES)), st.integers(1, 10_000), st.sampled_from([FLASH, PRO]), devices)
def test_every_rule_tiles_the_range(rule: str, most: int, size: tuple[int, int], num_sms: int) -> None:
    buckets = sorted(warm_up_buckets(rule, inputs(most, size, num_sms)), key=lambda b: b.first_token)

    covered = [token for b in buckets for token in (b.first_token, b.last_token + 1)]
    assert covered[0] == 1
    assert covered[-1] == most + 1
    assert covered[1:-1:2] == covered[2::2]
    assert all(b.first_token <= b.last_token for b in buckets)


def test_the_published_example_on_an_h200() -> None:
    tokens = (8192, 4224, 2816, 2112, 1664, 1408, 1152, 1024, 896, 832, 768, 704, 640, 576, 512, 448)
    tokens += (384, 320, 256, 192, 128, 64)

    assert representatives(8192, 28672, H200) == tokens
    assert representatives(8192, 16384, H200) == (*tokens[:-2], 128)


def test_a_thousand_million_tokens_take_less_than_a_millisecond() -> None:
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        found = representatives(10**9, 28672, H200)
        seconds.append(time.perf_counter() - started)

    assert found[0] == 10**9
    assert len(found) == 22
    assert min(seconds) < 1e-3


@pytest.mark.parametrize("most", [0, -1, -8192])
@pytest.mark.parametrize("rule", sorted(MHC_RULES))
def test_nothing_is_warm_for_no_tokens(rule: str, most: int) -> None:
    assert warm_up_buckets(rule, inputs(most)) == ()
    assert split_buckets(most, 16384, H200) == representatives(most, 16384, H200) == ()


@pytest.mark.parametrize("width", [0, -1])
def test_a_width_that_is_not_positive_is_refused(width: int) -> None:
    with pytest.raises(SpecError, match="hc_hidden_size"):
        split_buckets(1, width, H200)
    with pytest.raises(SpecError, match="hidden_size"):
        inputs(1, (4, width))
    with pytest.raises(SpecError, match="hc_mult"):
        inputs(1, (width, 4096))


@pytest.mark.parametrize("num_sms", [0, -1, 4097, 10**18])
def test_a_device_that_cannot_be_is_refused(num_sms: int) -> None:
    with pytest.raises(SpecError, match="num_sms"):
        split_buckets(1, 64, num_sms)
    with pytest.raises(SpecError, match="num_sms"):
        inputs(1, FLASH, num_sms)


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(SpecError, match=r"mhc\.rule.*vllm-collapsed"):
        warm_up_buckets("sglang", inputs(1))


def test_the_rules_are_those_that_a_spec_may_name() -> None:
    assert tuple(MHC_RULES) == typing.get_args(MhcRule)


@given(
    st.sampled_from(sorted(MHC_RULES)),
    st.integers(1, 2_000),
    st.sampled_from([FLASH, PRO]),
    devices,
    st.data(),
)
def test_the_class_of_a_step_is_that_of_its_bucket_however_many_tokens_others_have(
    rule: str, most: int, size: tuple[int, int], num_sms: int, data: st.DataObject
) -> None:
    splits = StepSplits(rule, *size, num_sms)
    tokens = data.draw(st.integers(1, most))

    containing = [b for b in splits.buckets(most) if b.first_token <= tokens <= b.last_token]

    assert [splits.n_splits(tokens)] == [bucket.n_splits for bucket in containing]
    assert splits.of_entry(PromptEntry(1, tokens, 3)) == splits.of_entry(DecodeEntry(tokens, 1, 9))


def test_the_rule_one_has_one_class_and_needs_no_device() -> None:
    assert warm_up_buckets("one", inputs(8192, num_sms=None)) == (MhcBucket(1, 1, 8192),)


@pytest.mark.parametrize("rule", ["sglang-pr25810", "sglang-fma", "vllm-collapsed"])
def test_an_unknown_device_is_refused_with_what_is_missing(rule: str) -> None:
    with pytest.raises(SpecError, match=r"target\.num_sms.*target\.profile"):
        warm_up_buckets(rule, inputs(8192, num_sms=None))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [(32, 1, 1)]),
        (2048, [(32, 1, 2048)]),
        (2049, [(1, 2049, 2049), (32, 1, 2048)]),
        (8192, [(1, 2049, 8192), (32, 1, 2048)]),
    ],
)
@pytest.mark.parametrize("size", [FLASH, PRO])
def test_deepgemm_off_splits_in_32_up_to_2048_tokens(
    most: int, expected: list[tuple[int, int, int]], size: tuple[int, int]
) -> None:
    buckets = warm_up_buckets("sglang-deepgemm-off", inputs(most, size, None))

    assert buckets == tuple(MhcBucket(*bucket) for bucket in expected)


def test_deepgemm_off_has_kernels_for_two_sizes_only() -> None:
    with pytest.raises(SpecError, match=r"8192 \(16384 or 28672"):
        warm_up_buckets("sglang-deepgemm-off", inputs(8192, (4, 2048)))


@pytest.mark.parametrize(
    ("most", "size", "expected"),
    [
        (7, FLASH, [(8, 1, 7)]),
        (8, FLASH, [(8, 1, 7), (4, 8, 8)]),
        (32, FLASH, [(8, 1, 7), (4, 8, 32)]),
        (33, FLASH, [(8, 1, 7), (4, 8, 32), (64, 33, 33)]),
        (200, FLASH, [(8, 1, 7), (4, 8, 32), (64, 33, 128), (44, 129, 192), (33, 193, 200)]),
        (33, PRO, [(4, 1, 7), (4, 8, 32), (112, 33, 33)]),
    ],
)
def test_the_fma_kernel_serves_up_to_32_tokens(
    most: int, size: tuple[int, int], expected: list[tuple[int, int, int]]
) -> None:
    assert warm_up_buckets("sglang-fma", inputs(most, size)) == tuple(MhcBucket(*b) for b in expected)


def test_up_to_32_tokens_the_fma_rule_needs_no_device() -> None:
    assert len(warm_up_buckets("sglang-fma", inputs(32, num_sms=None))) == 2


@given(budgets, devices, st.sampled_from([FLASH, PRO, (4, 64), (2, 3000)]))
def test_vllm_rounds_the_formula_to_three_values(most: int, num_sms: int, size: tuple[int, int]) -> None:
    def collapsed(tokens: int) -> int:
        splits = by_formula(tokens, size[0] * size[1], num_sms)
        return 1 if splits == 1 else 4 if splits <= 4 else 16

    buckets = warm_up_buckets("vllm-collapsed", inputs(most, size, num_sms))

    assert list(buckets) == by_brute_force(most, collapsed)[::-1]


def test_pr25810_warms_the_most_tokens_first_and_0_5_23_the_fewest() -> None:
    first, last = (warm_up_buckets(rule, inputs(8192))[0] for rule in ("sglang-pr25810", "sglang-fma"))

    assert (first.last_token, last.last_token) == (8192, 7)
