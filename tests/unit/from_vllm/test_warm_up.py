"""The warm-up log is, line for line, that of the public pages."""

from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.from_vllm.warm_up_log import LogLine, warm_up_log
from aotgaudi.manifest.enumerate import sampler_entries
from aotgaudi.manifest.manifest import Manifest
from tests.specs import ONE_BLOCK, spec_of

SETTINGS = [
    "temp=0.0, top_p=1.0, top_k=0",
    "temp=1.0, top_p=1.0, top_k=0",
    "temp=0.7, top_p=0.9, top_k=50",
    "temp=0.3, top_p=0.95, top_k=20",
    "temp=1.2, top_p=0.8, top_k=100",
    "temp=0.8, top_p=0.85, top_k=0",
]
SAMPLER = [
    *(f"{setting}, batch_changed={changed}" for changed in (True, False) for setting in SETTINGS),
    "Starting sampler warmup...",
    "Sampler warmup completed successfully",
]
THRESHOLDS = "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]"
DONE = "Defragmenter warmup completed successfully"
SKIPPED = "Skipping defragmenter warmup, insufficient blocks (1)"
NEWEST, V0_24, V0_16 = "vllm-gaudi@091bbad", "vllm-gaudi@v0.24.0", "vllm-gaudi@v0.16.0"


def log_of(num_blocks: int = 24, version: str = NEWEST, **tables: Any) -> list[str]:
    return [line.text for line in lines_of(num_blocks, version, **tables)]


def lines_of(num_blocks: int, version: str, **tables: Any) -> tuple[LogLine, ...]:
    limits = {**ONE_BLOCK, "num_blocks": num_blocks}
    defaults = {"bucketing": {"version": version}, "scheduler": {"engine": "vllm"}}
    spec = spec_of(limits=limits, **{**defaults, **tables})
    return warm_up_log(Manifest(spec, sampler_entries((1,), spec.sampler)))


def test_the_log_is_that_of_the_public_pages() -> None:
    head = "Warming up sampler with batch sizes: [1] and following configs:"

    assert log_of() == [head, *SAMPLER, THRESHOLDS, DONE]


def test_before_v0_16_an_empty_batch_is_warmed_besides() -> None:
    head = "Warming up sampler with batch sizes: [0, 1] and following configs:"

    log = log_of(version="vllm-gaudi@v0.14.1", sampler={"smallest_batch_size": 0})

    assert log == [head, *SAMPLER, THRESHOLDS, DONE]


@pytest.mark.parametrize("version", ["vllm-gaudi@v0.10.1", "vllm-hpu-extension@8211e0b"])
def test_a_version_without_these_warm_ups_logs_nothing(version: str) -> None:
    assert log_of(version=version) == []


@pytest.mark.parametrize(
    ("mode", "num_lines"), [("hpu_graphs", 17), ("torch_compile", 17), ("lazy", 0), ("eager", 0)]
)
def test_a_server_under_enforce_eager_logs_nothing(mode: str, num_lines: int) -> None:
    assert len(log_of(target={"backend": "hpu", "execution_mode": mode})) == num_lines


@pytest.mark.parametrize(
    ("version", "expected"), [(NEWEST, [SKIPPED]), (V0_24, [SKIPPED]), (V0_16, [THRESHOLDS, SKIPPED])]
)
def test_one_block_is_too_few_and_older_versions_announce_first(version: str, expected: list[str]) -> None:
    lines = lines_of(1, version)[15:]

    assert [line.text for line in lines] == expected
    assert [line.level for line in lines] == ["INFO"] * (len(expected) - 1) + ["WARNING"]


def test_a_defragmenter_that_is_off_logs_nothing() -> None:
    assert len(log_of(defrag={"enabled": False})) == len(log_of()) - 2


def test_columns_of_our_own_follow_where_they_are_on() -> None:
    setting = {"temperature": 0.5, "top_p": 1, "top_k": 0, "min_p": 0.1, "num_logprobs": 5}

    log = log_of(sampler={"settings": [setting]})

    assert log[1] == "temp=0.5, top_p=1.0, top_k=0, batch_changed=True, min_p=0.1, num_logprobs=5"
