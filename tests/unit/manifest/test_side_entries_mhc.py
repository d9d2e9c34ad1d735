"""Which hyper-connection entries a spec has, and when it has none."""

from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.entries import MhcEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import mhc_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from tests import specs

FLASH = {"model_type": "deepseek_v4", "hidden_size": 4096, "max_position_embeddings": 100_000}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "max_position_embeddings": 100_000}
H200 = {"backend": "cuda", "profile": "h200"}


def spec_of(config: dict[str, Any] = FLASH, tokens: int = 8192, **tables: Any) -> BuildSpec:
    model = {"name": "m", "dtype": "bfloat16", "config": config}
    limits = {"max_num_batched_tokens": tokens, "block_size": 64}
    return specs.spec_of(model=model, limits=limits, **tables)


def test_each_representative_is_warm_for_attention_then_for_ffn_most_tokens_first() -> None:
    entries = mhc_entries(spec_of(target=H200))

    assert len(entries) == 2 * 21
    assert entries[:4] == (
        MhcEntry(8192, 1, "attn"),
        MhcEntry(8192, 1, "ffn"),
        MhcEntry(4224, 2, "attn"),
        MhcEntry(4224, 2, "ffn"),
    )
    assert entries[-1] == MhcEntry(128, 64, "ffn")


def test_the_manifest_has_them_in_that_order() -> None:
    spec = spec_of(target=H200)

    assert Manifest.of(spec).of_kind("mhc") == mhc_entries(spec)


def test_the_budget_of_a_step_is_the_most_tokens_unless_the_spec_says_another() -> None:
    assert mhc_entries(spec_of(tokens=100, target=H200))[0].num_tokens == 100
    assert mhc_entries(spec_of(tokens=100, target=H200, mhc={"max_num_tokens": 3000}))[0].num_tokens == 3000


@pytest.mark.parametrize("backend", ["cpu", "hpu", "fake"])
def test_by_itself_only_a_cuda_target_has_them(backend: str) -> None:
    assert mhc_entries(spec_of(target={"backend": backend, "profile": "h200"})) == ()


@pytest.mark.parametrize("backend", ["cpu", "cuda", "hpu", "fake"])
def test_asked_for_every_target_has_them_for_the_profiles_device(backend: str) -> None:
    asked = spec_of(target={"backend": backend, "profile": "h200"}, mhc={"enabled": True})

    assert mhc_entries(asked) == mhc_entries(spec_of(target=H200))


def test_switched_off_no_target_has_them_and_needs_no_device() -> None:
    assert mhc_entries(spec_of(target={"backend": "cuda"}, mhc={"enabled": False})) == ()


@pytest.mark.parametrize("tables", [{"target": {"backend": "cuda"}}, {"mhc": {"enabled": True}}])
def test_a_device_is_not_guessed(tables: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"target\.num_sms: is missing"):
        mhc_entries(spec_of(**tables))


def test_a_model_without_them_has_none_and_may_not_ask_for_them() -> None:
    assert mhc_entries(spec_of(LLAMA, target={"backend": "cuda"})) == ()
    with pytest.raises(SpecError, match=r"mhc\.enabled: is true, but 'llama'"):
        mhc_entries(spec_of(LLAMA, target=H200, mhc={"enabled": True}))


@pytest.mark.parametrize(
    ("rule", "splits"),
    [("vllm-collapsed", [1, 4, 16]), ("sglang-deepgemm-off", [1, 32]), ("sglang-fma", [8, 4, 64])],
)
def test_the_rule_decides(rule: str, splits: list[int]) -> None:
    entries = mhc_entries(spec_of(target=H200, mhc={"rule": rule}))

    assert [entry.n_splits for entry in entries if entry.sublayer == "attn"][:3] == splits


def test_a_huge_budget_has_as_few_entries_as_a_small_one() -> None:
    assert len(mhc_entries(spec_of(target=H200, mhc={"max_num_tokens": 10**9}))) == 2 * 21
