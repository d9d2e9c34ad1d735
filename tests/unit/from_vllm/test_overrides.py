from __future__ import annotations

import json
from typing import Any

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.overrides import overridden
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from tests.unit.from_vllm.test_from_vllm import LINEAR, LLAMA, mistake, read, spec

PARTS = {"model_type": "llava", "text_config": {**LLAMA, "rope_scaling": {**LINEAR, "type": "linear"}}}


def changed(overrides: dict[str, Any], release: str = "0.26.0", config: dict[str, Any] | None = None) -> Any:
    flags = {"hf-overrides": json.dumps(overrides)}
    return overridden(LLAMA if config is None else config, flags, release)[0]


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ("--hf-overrides '{\"max_position_embeddings\": 4096}'", {**LLAMA, "max_position_embeddings": 4096}),
        ("--hf-overrides.max_position_embeddings 4096", {**LLAMA, "max_position_embeddings": 4096}),
        ("--hf-overrides.rope_scaling '{\"rope_type\": \"linear\", \"factor\": 2.0}'", {**LLAMA, "rope_scaling": LINEAR}),
        ("--hf-overrides {}", LLAMA),
    ],
)  # fmt: skip
def test_an_override_gives_the_manifest_of_the_changed_config(flags: str, config: dict[str, Any]) -> None:
    one, other = spec(flags), spec(config=config)

    assert Manifest(one, enumerate_entries(one)).id == Manifest(other, enumerate_entries(other)).id


def test_older_releases_have_flags_for_the_rope_which_win_over_overrides() -> None:
    flags = '--rope-theta 5e5 --rope-scaling \'{"rope_type": "linear", "factor": 2.0}\' --hf-overrides.rope_theta 1'

    found, report = read(flags, version="vllm-gaudi@v0.10.1")

    assert found.limits.max_model_len == 16384
    assert (found.model.config["rope_theta"], found.model.config["rope_scaling"]) == (5e5, LINEAR)
    assert "rope_theta, rope_scaling changed" in "\n".join(report.notes)
    assert "no flag of vLLM 0.11.2" in mistake("--rope-theta 5e5", version="vllm-gaudi@v0.11.2").problem
    no_type = mistake("""--rope-scaling '{"type": "linear"}'""", version="vllm-gaudi@v0.10.1")
    assert (no_type.where, "has no rope_type" in no_type.problem) == ("--rope-scaling", True)


def test_releases_between_transformers_4_and_5_do_not_read_an_overridden_rope_scaling() -> None:
    flags = {"hf-overrides": json.dumps({"rope_scaling": LINEAR, "vocab_size": 5})}

    config, notes = overridden(LLAMA, flags, "0.13.0")

    assert config == {**LLAMA, "vocab_size": 5}
    assert any("does not read it" in note for note in notes)


@pytest.mark.parametrize("release", ["0.9.0.1", "0.10.1", "0.11.2", "0.13.0", "0.26.0"])
def test_no_release_completes_a_rope_without_a_type(release: str) -> None:
    rope = {"rope_parameters" if release == "0.13.0" else "rope_scaling": {"type": "linear", "factor": 2.0}}

    with pytest.raises(SpecError, match="has no rope_type"):
        changed(rope, release)


@pytest.mark.parametrize(
    "overrides",
    [{"rope_scaling": None}, {"text_config": {"rope_scaling": LINEAR}}, {"rope_parameters": None}],
)
def test_what_a_release_reads_only_at_first_is_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(
        SpecError, match=r"rope_\w+: may have no effect in vLLM 0\.13\.0 \(an object rope_par"
    ):
        changed(overrides, "0.13.0", PARTS)


@pytest.mark.parametrize("kind", [["yarn"], {"a": 1}, None])
def test_a_type_that_is_no_text_is_a_mistake(kind: Any) -> None:
    with pytest.raises(SpecError, match="has no rope_type"):
        changed({"rope_scaling": {"rope_type": kind, "factor": 2.0}})


def test_the_config_of_a_part_is_changed_key_by_key() -> None:
    found = changed(
        {"text_config": {"vocab_size": 5, "rope_parameters": {"rope_type": "dynamic"}}}, config=PARTS
    )

    rope = {"rope_type": "dynamic", "factor": 2.0}
    assert found == {**PARTS, "text_config": {**LLAMA, "vocab_size": 5, "rope_parameters": rope}}


@pytest.mark.parametrize(
    ("overrides", "release", "where", "what"),
    [
        ({"text_config": {"vocab_size": 5}}, "0.10.1", "text_config", "replaces all of it"),
        ({"text_config": {"model_type": "opt"}}, "0.26.0", "text_config.model_type", "chooses"),
        ({"model_type": "llama"}, "0.26.0", "model_type", "chooses the model's class"),
        ({"architectures": ["X"]}, "0.26.0", "architectures", "chooses the model's class"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "0.26.0", "rope_scaling", "has no original"),
        ({"rope_scaling": {"full_attention": LINEAR}}, "0.26.0", "rope_scaling", "has no rope_type"),
    ],
)
def test_what_vllm_does_not_start_with_or_changes_the_class_is_refused(
    overrides: dict[str, Any], release: str, where: str, what: str
) -> None:
    with pytest.raises(SpecError) as caught:
        changed(overrides, release, PARTS)

    assert caught.value.where == f"--hf-overrides {where}"
    assert what in caught.value.problem


def test_a_class_that_stays_the_same_is_taken() -> None:
    assert changed({"model_type": "llama"}) == LLAMA
