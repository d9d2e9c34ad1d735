"""What a spec says of embeddings, and what it takes from a sentence-transformers checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest, dumps, loads
from aotgaudi.spec.parse import load_spec
from aotgaudi.spec.pooler import PoolerSpec, read_pooler
from aotgaudi.spec.write import write_spec
from tests.specs import CONFIG, spec_of, spec_tables

TRANSFORMER, POOLING, NORMALIZE = (
    {"path": path, "type": f"sentence_transformers.models.{kind}"}
    for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
)


def _checkpoint(folder: Path, modules: object, pooling: object = None) -> Path:
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def _spec_file(folder: Path, more: str = "") -> Path:
    path = folder / "tiny.toml"
    limits = "\n".join(f"{name} = {value}" for name, value in spec_tables()["limits"].items())
    model = f'name = "tiny"\ndtype = "float32"\nconfig = "config.json"\nrunner = "pooling"\n{more}'
    path.write_text(f'schema = "aotgaudi.spec/1"\n[limits]\n{limits}\n[model]\n{model}')
    return path


def test_without_a_word_of_it_a_model_generates_and_its_keys_are_as_before() -> None:
    spec = spec_of()

    assert spec.model.generates
    assert not {"runner", "pooler"} & spec.to_json()["model"].keys()
    assert not any("pooler" in name for name, _ in spec.model.signature().components)


def test_a_pooling_model_has_prompts_only_and_they_are_proved() -> None:
    manifest = Manifest.of(spec_of(model={"runner": "pooling"}))

    coverage = coverage_of(manifest)

    assert {entry.kind for entry in manifest.entries} == {"prompt"}
    assert [phase.kind for phase in coverage.phases] == ["prompt"]
    assert coverage.is_closed
    assert loads(dumps(manifest)).id == manifest.id


def test_a_missing_prompt_is_a_hole() -> None:
    manifest = Manifest.of(spec_of(model={"runner": "pooling"}))

    without = Manifest(manifest.spec, manifest.entries[:-1])

    assert "prompt chunk" in str(coverage_of(without).smallest)


def test_the_pooling_type_is_in_the_key_and_the_rest_is_not() -> None:
    def pooling(**pooler: object) -> str:
        return spec_of(model={"runner": "pooling", "pooler": pooler}).model.signature().hex

    assert pooling() == pooling(normalize=False)
    assert len({pooling(), pooling(pooling_type="MEAN"), pooling(pooling_type="CLS")}) == 3
    assert pooling() != spec_of().model.signature().hex


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode_lasttoken": True}, ("LAST", True)),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True}, ("MEAN", False)),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": False},
            ("CLS", False),
        ),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "mean"}, ("MEAN", True)),
    ],
)
def test_the_checkpoint_says_how_to_pool(
    tmp_path: Path, modules: object, pooling: Mapping[str, Any], expected: tuple[str, bool]
) -> None:
    folder = _checkpoint(tmp_path / "m", modules, pooling)

    pooler = load_spec(_spec_file(folder)).model.pooler

    assert pooler == PoolerSpec(pooling_type=expected[0], normalize=expected[1])


def test_what_the_spec_says_wins_over_the_checkpoint(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "m", [TRANSFORMER, {"path": "2_Dense", "type": "x.Dense"}])

    pooler = load_spec(_spec_file(folder, '[model.pooler]\npooling_type = "CLS"')).model.pooler

    assert pooler == PoolerSpec(pooling_type="CLS", normalize=True)


def test_a_checkpoint_that_says_nothing_is_pooled_as_vllm_does(tmp_path: Path) -> None:
    assert read_pooler(tmp_path) == {}
    assert spec_of(model={"runner": "pooling"}).model.pooler == PoolerSpec(
        pooling_type="LAST", normalize=True
    )


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        ({}, None, "no list of modules"),
        ([TRANSFORMER, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}], None, "'Dense'"),
        ([TRANSFORMER, POOLING], None, "is missing"),
        ([TRANSFORMER, POOLING], [], "no JSON object"),
        ([TRANSFORMER, POOLING], {}, "pooling by none"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_cls_token, pooling_mode_mean_tokens",
        ),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_mean_tokens": True, "include_prompt": False},
            "without the prompt",
        ),
    ],
)
def test_a_pooling_that_is_not_computed_is_refused_by_name(
    tmp_path: Path, modules: object, pooling: object, words: str
) -> None:
    folder = _checkpoint(tmp_path / "m", modules, pooling)

    with pytest.raises(SpecError, match=words):
        read_pooler(folder)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[" * 100_000)

    with pytest.raises(SpecError, match=r"modules\.json: is not JSON"):
        read_pooler(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"model_type": "bert"}}, "'bert', an encoder.*encoders are not supported"),
        ({"config": {"model_type": "xlm-roberta"}}, "encoder"),
        ({"config": {"model_type": "gemma3_text", "use_bidirectional_attention": True}}, "see those after"),
        ({"config": {"model_type": "qwen2", "is_causal": False}}, "is_causal = false"),
        ({"sampler": {"settings": [{"temperature": 0.0, "top_p": 1.0, "top_k": 0}]}}, "sampler"),
        ({"defrag": {"threshold": 3}}, "defrag"),
        ({"scheduler": {"engine": "vllm"}}, 'engine = "aotgaudi"'),
    ],
)
def test_what_cannot_pool_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec_of(model={"runner": "pooling"}, **changes) if "config" not in changes else spec_of(
            model={"runner": "pooling", "config": {**CONFIG, **changes["config"]}}
        )


def test_a_pooler_needs_the_runner() -> None:
    with pytest.raises(SpecError, match='runner = "pooling"'):
        spec_of(model={"pooler": {"pooling_type": "MEAN"}})


def test_a_mean_has_no_batch_invariant_form() -> None:
    with pytest.raises(SpecError, match="cut into chunks"):
        spec_of(model={"runner": "pooling", "batch_invariant": True, "pooler": {"pooling_type": "MEAN"}})


def test_it_is_written_and_read_again(tmp_path: Path) -> None:
    spec = spec_of(model={"runner": "pooling", "pooler": {"pooling_type": "MEAN", "normalize": False}})

    write_spec(tmp_path / "x.toml", spec)

    assert load_spec(tmp_path / "x.toml") == spec
