"""The length that we read from a config under --hf-overrides beside the one that vLLM served (see vllm_overrides.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.bucketing.versions import find_version
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.model import ModelFacts, served_length
from aotgaudi.from_vllm.overrides import overridden
from tests.golden.vllm_answers import LENGTHS
from tests.golden.vllm_overrides import CASES

TABLES = sorted((Path(__file__).parent / "data" / "vllm-overrides").glob("*.json"))
NOT_STARTED: dict[str, object] = {"default": None, "taken": []}
REFUSED = {
    "0.10.1": ("old key",),
    "0.13.0": (
        *("no scaling", "no parameters", "no scaling, but parameters", "no parameters at all"),
        *("a part's scaling", "one key of a part's scaling", "a part's type alone", "a part's old key"),
        *("a part without parameters", "a part without scaling"),
    ),
}
"""What we refuse, though that release starts: what it reads of a RoPE depends on when."""


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_our_length_is_the_one_that_vllm_served(table: Path) -> None:
    expected = json.loads(table.read_text(encoding="utf-8"))

    assert expected.keys() == CASES.keys()
    refused = dict.fromkeys(REFUSED.get(table.stem, ()), NOT_STARTED)
    assert {name: _ours(name, table.stem) for name in CASES} == {**expected, **refused}


def _ours(name: str, release: str) -> dict[str, object]:
    config, overrides = CASES[name]
    try:
        changed, _ = overridden(config, {"hf-overrides": json.dumps(overrides)}, release)
        facts = ModelFacts.of(changed, find_version("vllm-gaudi@v0.26.0").environment)
        served = served_length(facts.length_keys, release)
    except SpecError:
        return NOT_STARTED
    assert served is not None
    return {"default": served.by_default, "taken": [length for length in LENGTHS if length <= served.most]}
