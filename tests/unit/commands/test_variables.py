from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.commands.flags import CONDITIONS, NEUTRAL_FLAGS, NEUTRAL_VARIABLES, VARIABLES
from aotgaudi.commands.variables import (
    NEUTRAL,
    VariableRules,
    is_secret,
    is_secret_key,
    secret_values,
    without_credentials,
)
from aotgaudi.gaudi.environment import ENGINE_RULES
from aotgaudi.gaudi.environment import NEUTRAL as OF_GAUDI
from aotgaudi.wrap.adapters.vllm import VLLM
from aotgaudi.wrap.adapters.vllm_gaudi import VLLM_GAUDI
from tests.environment import ROOT

RULES: VariableRules = VLLM.variable_rules
SECRETS = [
    "HF_TOKEN",
    "VLLM_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "S3_ACCESS_KEY_ID",
    "api-key",
    "hf-token",
    "DB_PASSWORD",
]
PUBLIC = [
    "max-num-batched-tokens",
    "tokenizer",
    "VLLM_PORT",
    "long-prefill-token-threshold",
    "ssl-keyfile",
    "MONKEY",
]


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_other_names_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret(name)


def test_a_models_tables_have_tokens_that_are_none() -> None:
    assert not is_secret_key("image_token")
    assert is_secret_key("secretAccessKey")
    assert is_secret_key("hf_token")


@given(name=st.from_regex(r"VLLM_[A-Z]{1,12}(_[A-Z]{1,8})?", fullmatch=True), value=st.text(max_size=8))
def test_a_variable_that_nobody_knew_of_counts(name: str, value: str) -> None:
    counted = RULES.keyed({name: value})

    assert counted or RULES.reason(name)
    if name not in RULES.neutral and name not in RULES.hashed and not is_secret(name):
        assert counted == {name: without_credentials(value)} or RULES.reason(name) is not None


def test_every_exclusion_has_a_reason_and_a_variable_is_of_one_kind() -> None:
    assert all({**NEUTRAL, **NEUTRAL_VARIABLES, **NEUTRAL_FLAGS}.values())
    assert not NEUTRAL_VARIABLES.keys() & CONDITIONS.keys()


def test_what_is_of_nothing_that_compiles_does_not_count() -> None:
    environ = {"PATH": "/bin", "HOME": "/root", "SHLVL": "1", "HOSTNAME": "pod", "MY_APP": "1"}

    assert RULES.keyed(environ) == {}
    assert RULES.conditions(environ) == {}


def test_conditions_are_what_the_guest_hashes_though_it_changes_nothing() -> None:
    environ = {"VLLM_IMAGE_TAG": "v1", "VLLM_USE_AOT_COMPILE": "1", "VLLM_PORT": "1"}

    assert RULES.conditions(environ) == {"VLLM_IMAGE_TAG": "v1"}
    assert RULES.keyed(environ) == {"VLLM_USE_AOT_COMPILE": "1"}


def test_values_of_secrets_are_found_for_those_who_look_for_them_in_files() -> None:
    assert secret_values({"HF_TOKEN": "x", "VLLM_API_KEY": "", "A": "b"}) == {"HF_TOKEN": "x"}


FACTORS = json.loads((ROOT / "tests" / "golden" / "data" / "vllm-factors.json").read_text(encoding="utf-8"))
KNOWN = sorted(
    name
    for name in {*VARIABLES, *FACTORS["variables"], *OF_GAUDI, *ENGINE_RULES.settings}
    if "*" not in name and name not in ("QUANT_CONFIG", "GC_KERNEL_PATH", "SYNAPSE_CONFIGURATION_FILE")
)
"""Every known variable of vLLM, of its plugin for Gaudi, and of the bridge, but those that name files."""


@pytest.mark.parametrize("rules", [VLLM.variable_rules, VLLM_GAUDI.variable_rules], ids=["vllm", "gaudi"])
def test_each_variable_that_is_changed_counts_or_says_why_it_does_not(rules: VariableRules) -> None:
    wrong = []
    for name in KNOWN:
        reason, counted = rules.reason(name), [rules.keyed({name: value}) for value in "12"]
        expected = [{name: "1"}, {name: "2"}] if reason is None else [{}, {}]
        if counted != expected or reason == "":
            wrong.append((name, reason, counted))

    assert wrong == []
