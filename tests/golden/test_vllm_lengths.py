"""The length that we read from a config beside the one that vLLM served, release by release (see vllm_answers.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.model import served_length
from tests.golden.vllm_answers import CONFIGS, LENGTHS

TABLES = sorted((Path(__file__).parent / "data" / "vllm-lengths").glob("*.json"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_our_length_is_the_one_that_vllm_served(table: Path) -> None:
    expected = json.loads(table.read_text(encoding="utf-8"))

    assert expected.keys() == CONFIGS.keys()
    assert {name: _ours(name, table.stem) for name in CONFIGS} == expected


def _ours(name: str, release: str) -> dict[str, object]:
    try:
        served = served_length(CONFIGS[name], release)
    except SpecError:
        return {"default": None, "taken": []}
    assert served is not None
    return {"default": served.by_default, "taken": [length for length in LENGTHS if length <= served.most]}
