"""The length that we read from a config under --hf-overrides beside the one that vLLM served (see vllm_overrides.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.bucketing.versions import find_version
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.model import ModelFacts, served_length
from aotgaudi.from_vllm.overrides import overridden
from tests.golden.vllm_lengths import LENGTHS
from tests.golden.vllm_overrides import CASES

TABLES = sorted((Path(__file__).parent / "data" / "vllm-overrides").glob("*.json"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_our_length_is_the_one_that_vllm_served(table: Path) -> None:
    expected = json.loads(table.read_text(encoding="utf-8"))

    assert expected.keys() == CASES.keys()
    assert {name: _ours(name, table.stem) for name in CASES} == expected


def _ours(name: str, release: str) -> dict[str, object]:
    config, overrides = CASES[name]
    try:
        changed, _ = overridden(config, {"hf-overrides": json.dumps(overrides)}, release)
        facts = ModelFacts.of(changed, find_version("vllm-gaudi@v0.26.0").environment)
        served = served_length(facts.length_keys, release)
    except SpecError:
        return {"default": None, "taken": []}
    assert served is not None
    return {"default": served.by_default, "taken": [length for length in LENGTHS if length <= served.most]}
