"""What is left out of a launch's key, against what vLLM hashes: the names that vLLM 0.32.0 for CPUs hashed when it was run.

`data/vllm-factors.json` holds the names alone, as the witness wrote them down in a cold start: the variables of
``compile_factors``, and the members of each configuration of ``compute_hash``.
"""

from __future__ import annotations

import json

from aotgaudi.commands.flags import CONDITIONS, NEUTRAL_FLAGS, NEUTRAL_VARIABLES
from aotgaudi.wrap.adapters.vllm import VLLM
from tests.environment import ROOT

FACTORS = json.loads((ROOT / "tests" / "golden" / "data" / "vllm-factors.json").read_text(encoding="utf-8"))
VARIABLES = frozenset(FACTORS["variables"])
MEMBERS = frozenset(name for names in FACTORS["configuration"].values() for name in names)


def test_no_variable_that_is_left_out_is_in_vllms_hash() -> None:
    assert sorted(set(NEUTRAL_VARIABLES) & VARIABLES) == []


def test_every_condition_is_in_vllms_hash() -> None:
    assert sorted(set(CONDITIONS) - VARIABLES) == []


def test_every_variable_of_vllms_hash_counts_or_is_a_condition() -> None:
    rules = VLLM.variable_rules
    hashed = [name for name in VARIABLES if not name.startswith("RAY_")]  # Launches on Ray are refused.

    silent = [name for name in hashed if rules.reason(name) is not None and name not in CONDITIONS]

    assert sorted(silent) == []


def test_of_the_flags_that_are_left_out_only_the_models_path_is_in_vllms_hash() -> None:
    hashed = {name for name in NEUTRAL_FLAGS if name.replace("-", "_") in MEMBERS}

    assert hashed == {"model"}  # Which an alias makes what it was: the condition model.name.
