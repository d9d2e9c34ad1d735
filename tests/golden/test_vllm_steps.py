"""The sizes of steps that we read from a command beside those of vLLM itself, release by release (see vllm_answers.py).

Async scheduling is recorded and not compared: it forms the same steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.from_vllm import model
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.from_vllm.limits import Pin
from aotgaudi.from_vllm.model import release_numbers, vllm_release
from aotgaudi.from_vllm.spec import VllmSetup, spec_from_vllm
from aotgaudi.spec.bucketing import VersionName
from tests.golden.vllm_answers import CASES, MODELS

TABLES = sorted((Path(__file__).parent / "data" / "vllm-steps").glob("*.json"))
NEWEST = "vllm-gaudi@091bbad"


def served(name: str, words: str) -> dict[str, Any] | None:
    """What our rules make of a case; None if they refuse it."""
    setup = VllmSetup(
        command=VllmCommand.parse(f"vllm serve org/model {words}"),
        environment={},
        config=MODELS[name],
        version=NEWEST,
        pin=Pin(num_blocks=2**16),
        read_file=str,
        digest_file=str,
    )
    try:
        spec, _ = spec_from_vllm(setup)
    except SpecError:
        return None
    return {
        "max_model_len": spec.limits.max_model_len,
        "max_num_batched_tokens": spec.limits.max_num_batched_tokens,
        "max_num_seqs": spec.limits.max_num_seqs,
        "chunked_prefill": spec.scheduler.chunked_prefill,
        "prefix_caching": spec.bucketing.prefix_caching,
        "block_size": spec.limits.block_size,
    }


def compared(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """What vLLM said, without what is recorded only. A step has as many tokens as are scheduled, or more."""
    if answer is None:
        return None
    assert answer["max_num_scheduled_tokens"] in (None, answer["max_num_batched_tokens"])
    recorded = ("max_num_scheduled_tokens", "async_scheduling")
    return {name: value for name, value in answer.items() if name not in recorded}


def without_block_size(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of models with recurrent layers the user gives it, as a note says: up to 0.17 vLLM derives it from their states."""
    return None if answer is None else {**answer, "block_size": None}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_our_sizes_are_those_of_vllm(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model._RELEASES, NEWEST, table.stem)  # type: ignore[attr-defined]
    expected = json.loads(table.read_text(encoding="utf-8"))

    cases = {f"{name}: {words}": (name, words) for name, words in CASES}
    assert expected.keys() <= cases.keys()  # An old release does not know all models.
    assert len(expected) >= 90
    ours = {case: served(*cases[case]) for case in expected}
    theirs = {case: compared(answer) for case, answer in expected.items()}
    for case in (case for case in expected if cases[case][0] == "qwen3 next"):
        ours[case], theirs[case] = without_block_size(ours[case]), without_block_size(theirs[case])
    assert ours == theirs


def test_each_version_of_the_plugin_builds_on_a_release_that_was_asked_or_an_older_one() -> None:
    asked = max(release_numbers(table.stem) for table in TABLES)

    assert all(release_numbers(vllm_release(version)) <= asked for version in get_args(VersionName))
