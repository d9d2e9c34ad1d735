"""Before a unit is compiled, the graphs of a model are compared with transformers' own model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.receipt import ModelCheck, Receipt, loads
from aotgaudi.compile import model_comparison
from aotgaudi.compile.jobs import explained
from aotgaudi.compile.model_comparison import compare_model, fill, transformers_model
from aotgaudi.compile.model_reduction import MOST_PARAMETERS, reduced_model
from aotgaudi.compile.pipeline import build, plan_manifest, seal
from aotgaudi.compile.why import History
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import ModelDiffersError, SpecError
from aotgaudi.graphs import masks, step, trace
from aotgaudi.graphs.dialect import ATEN, Dialect
from aotgaudi.graphs.mixers import uniform
from aotgaudi.manifest.manifest import load_manifest_or_spec
from aotgaudi.spec.model import ModelSpec
from aotgaudi.store.store import Store
from tests.command import Command
from tests.integration.models import ARCHITECTURES, reference, spec_of
from tests.integration.test_build import LLAMA, aotgaudi, environment, write_spec
from tests.parallel import nightly

CHECKED = ("llama", "mistral", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3")
"""What the others have besides is compared by tests/unit/graphs/test_trace.py with one set of weights."""


@pytest.fixture
def fresh_tracers() -> Iterator[None]:
    """A tracer that was made while a part was replaced serves no other test."""
    trace._tracer.cache_clear()
    yield
    trace._tracer.cache_clear()


def model_of(architecture: str, **others: Any) -> ModelSpec:
    return spec_of(reference(architecture, **others)).model


def compared(model: ModelSpec, dialect: Dialect = ATEN) -> ModelCheck:
    return compare_model(model, dialect)


@pytest.mark.parametrize(
    "architecture",
    [*CHECKED, *nightly(*(each for each in ARCHITECTURES if each not in CHECKED))],
)
def test_graphs_of_supported_families_agree(architecture: str) -> None:
    assert compared(model_of(architecture)).layers


def test_a_window_of_no_tokens_is_none() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = {**LLAMA, **experts, "model_type": "qwen2_moe", "sliding_window": 0, "use_sliding_window": False}

    assert compared(ModelSpec(name="x", dtype="float32", config=config)).layers


@pytest.mark.parametrize("dialect", [Dialect("hpu"), Dialect("hpu", is_contiguous=True)])
def test_graphs_of_a_gaudi_agree(dialect: Dialect) -> None:
    assert compared(model_of("llama"), dialect).layers


def test_weights_in_8_bits_are_compared_with_what_they_stand_for() -> None:
    quantized = spec_of(reference("llama", tie_word_embeddings=True), quantization="int8").model

    assert compared(quantized).layers


def _mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    softcapped = uniform._attend_dense

    def forgetful(query: Any, keys: Any, values: Any, mask: Any, call: Any) -> Any:
        return softcapped(query, keys, values.roll(1, dims=1), mask, call)

    monkeypatch.setattr(uniform, "_attend_dense", forgetful)


def _window(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(spans: Any, query_len: int, num_cached: int, window: int | None) -> Any:
        return masks.prompt_mask(spans, query_len, num_cached, window and window + 1)

    monkeypatch.setattr("aotgaudi.engine.runner.prompt_mask", longer)


def _norm(monkeypatch: pytest.MonkeyPatch) -> None:
    build_model = step.build_model

    def other_norm(config: Any, dtype: str) -> Any:
        model = build_model(config, dtype)
        model.model.layers[-1].post_attention_layernorm.variance_epsilon *= 1000
        return model

    monkeypatch.setattr(trace, "build_model", other_norm)


@pytest.mark.parametrize(
    ("mutate", "architecture", "layer"),
    [
        (_mixer, "llama", r"layer 0 \(LlamaDecoderLayer\)"),
        (_window, "gemma3_text", r"layer 0 \(sliding_attention\)"),
        (_norm, "mistral", r"layer 0 \(MistralDecoderLayer\)"),
    ],
)
def test_a_graph_that_differs_a_little_is_refused_by_family_and_layer(
    mutate: Callable[[pytest.MonkeyPatch], None],
    architecture: str,
    layer: str,
    monkeypatch: pytest.MonkeyPatch,
    fresh_tracers: None,
) -> None:
    model = model_of(architecture)
    mutate(monkeypatch)

    with pytest.raises(
        ModelDiffersError, match=rf"'{architecture}'.*{layer}.* differ by .*, allowed "
    ) as found:
        compared(model)

    assert found.value.exit_code == 6


def test_a_kind_of_layer_that_comes_second_is_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, fresh_tracers: None
) -> None:
    model = model_of("gemma3_text")
    attend = uniform.PromptState.attend

    def scaled(self: Any, call: Any) -> Any:
        return attend(self, call if call.sliding_window else replace(call, scaling=call.scaling * 1.01))

    monkeypatch.setattr(uniform.PromptState, "attend", scaled)

    with pytest.raises(ModelDiffersError, match=r"from layer 1 \(full_attention\) on"):
        compared(model)


def test_chunked_attention_that_is_traced_as_full_attention_is_refused() -> None:
    config = {
        **LLAMA,
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "attention_chunk_size": 8192,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    }

    with pytest.raises(ModelDiffersError, match=r"'llama4_text'.*chunked_attention"):
        compared(ModelSpec(name="x", dtype="bfloat16", config=config))


def test_a_wrong_model_is_refused_by_name_before_a_unit_is_compiled(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, {**LLAMA, "model_type": "diffllama", "num_key_value_heads": 2})
    spec.write_text(spec.read_text().replace('"fake"', '"cpu"'))

    built = aotgaudi(tmp_path, "build", "tiny.toml", "--store", "store", "-j", "1")

    assert built.returncode == 6, built.stderr
    error = built.stderr.splitlines()[-1]
    assert "model 'diffllama'" in error
    assert "from layer 0 (DiffLlamaDecoderLayer) on" in error
    assert not History.of_store(Store.open(tmp_path / "store")).units


@pytest.mark.parametrize("family", ["nemotron", *nightly("stablelm")])
def test_a_family_whose_layers_drop_keywords_is_refused_in_words(family: str, tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": family, "num_hidden_layers": 1}
    write_spec(tmp_path, config)

    built = aotgaudi(tmp_path, "build", "tiny.toml", "--store", "store", "-j", "1")

    assert built.returncode == 2, built.stderr
    assert f"'{family}' does not hand the keywords of a call on" in built.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("2"), "attends more often than its config has layers"),
        (SpecError("x", "not supported: 'aotgaudi_paged'", "y"), "attention classes of its own"),
        (ValueError("'head_dim' is a per-layer attribute and may vary"), "layers that differ in head_dim"),
        (SpecError("model (x)", "does not export: data-dependent", "y"), None),
        (KeyError("weight"), None),
    ],
)
def test_errors_of_traces_that_help_nobody_name_the_family(error: Exception, words: str | None) -> None:
    said = explained(error, "x")

    assert (said is None) == (words is None)
    assert (words or "") in str(said)


def on_the_fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.compile.plan.CHECKED_BACKENDS", frozenset({"fake"}))


SECOND_BUILD = """
import sys
from aotgaudi.compile import pipeline, plan
plan.CHECKED_BACKENDS = frozenset({"fake"})
result = pipeline.build("tiny.toml", "again.bundle", store="store")
assert not result.outcome.num_workers
assert "torch" not in sys.modules
"""


def test_the_check_is_recorded_sealed_and_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_fake_backend(monkeypatch)
    spec = write_spec(tmp_path, LLAMA)

    first = build(spec, tmp_path / "one.bundle", store=tmp_path / "store", jobs=1)

    made = first.outcome.model_check
    assert made is not None
    assert made.seconds > 0
    assert made.check.reduced == {"num_hidden_layers": 2}
    receipt = open_bundle(tmp_path / "one.bundle").require_programs()
    assert receipt.model_check == made.check
    assert loads(receipt.dumps()) == receipt
    subprocess.run([sys.executable, "-c", SECOND_BUILD], cwd=tmp_path, env=environment(), check=True)
    assert (tmp_path / "again.bundle/receipt.json").read_bytes() == receipt.dumps()
    verified = aotgaudi(tmp_path, "verify", "one.bundle", "--no-target")
    assert "graphs    agrees with transformers" in verified.stdout
    assert json.loads(aotgaudi(tmp_path, "verify", "one.bundle", "--no-target", "--json").stdout)[
        "model_check"
    ]


def test_units_from_before_are_sealed_without_it_and_the_next_build_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(tmp_path, LLAMA)
    build(spec, None, store=tmp_path / "store", jobs=1)
    on_the_fake_backend(monkeypatch)
    store, manifest = Store.open(tmp_path / "store"), load_manifest_or_spec(spec)

    seal(manifest, store, tmp_path / "before.bundle")

    before = open_bundle(tmp_path / "before.bundle").require_programs()
    assert before.model_check is None
    assert "model_check" not in before.model_dump(mode="json")
    verified = aotgaudi(tmp_path, "verify", "before.bundle", "--no-target")
    assert "graphs    not compared with transformers" in verified.stdout
    planned = Command("build", "plan")(spec, "--store", store.root)
    assert planned.stdout.splitlines()[1].startswith("  compare  the graphs with transformers' model"), (
        planned.output
    )
    again = build(manifest, tmp_path / "after.bundle", store=store, jobs=1)
    assert (again.outcome.num_traced, again.outcome.compiled) == (0, ())
    after = open_bundle(tmp_path / "after.bundle").require_programs()
    assert after.model_check is not None
    assert after.model_copy(update={"model_check": None}) == before
    plan = plan_manifest(manifest, store)
    assert plan.model_check is not None
    assert plan.model_check.key.hex in plan.as_root("x").keys


def test_a_spec_with_other_limits_or_of_no_steps_has_the_same_check_or_none() -> None:
    from aotgaudi.backends.fake import probe
    from aotgaudi.compile.plan import check_key_of
    from tests.workload import tiny_spec

    spec, cpu = tiny_spec(), probe().model_copy(update={"backend": "cpu"})
    longer = spec.model_copy(update={"limits": spec.limits.model_copy(update={"num_blocks": 999})})
    entries = (PromptEntry(1, 16, 0), DecodeEntry(1, 1, 1))

    assert check_key_of(entries, spec, cpu) == check_key_of(entries, longer, cpu)
    assert check_key_of(entries, spec, probe()) is None
    assert check_key_of((), spec, cpu) is None


def test_a_large_model_is_compared_in_small_with_each_kind_of_layer() -> None:
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "head_dim": 256,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
    }

    small = reduced_model(ModelSpec(name="x", dtype="bfloat16", config=config), transformers_model)

    assert small.layers == ("sliding_attention", "sliding_attention", "full_attention")
    assert small.reduced["sliding_window"] == 24
    assert small.reduced["num_attention_heads"] == 2 * small.reduced["num_key_value_heads"]
    assert "head_dim" not in small.reduced
    with torch.device("meta"):
        model = transformers_model(small.model.config)
    assert sum(each.numel() for each in model.parameters()) < MOST_PARAMETERS


def test_a_model_that_does_not_work_in_small_is_compared_in_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_wide(model: ModelSpec, *_: object) -> None:
        if model.hidden_size < 64:
            raise RuntimeError("too narrow")

    monkeypatch.setattr(model_comparison, "MOST_PARAMETERS", 10_000)
    monkeypatch.setattr(model_comparison, "_difference", only_wide)

    assert "hidden_size" not in compared(model_of("llama")).reduced
    with pytest.raises(RuntimeError, match="too narrow"):
        compared(model_of("llama", hidden_size=32, head_dim=8, num_attention_heads=2))


def test_layers_that_no_list_chooses_are_taken_from_the_first_on() -> None:
    config = model_of("deepseek_v3", num_hidden_layers=12, first_k_dense_replace=3).config

    small = reduced_model(ModelSpec(name="x", dtype="float32", config=config), transformers_model)

    dense, sparse = "DeepseekV3DecoderLayer, DeepseekV3MLP", "DeepseekV3DecoderLayer, DeepseekV3MoE"
    assert small.layers == (dense, dense, dense, sparse, sparse)
    assert small.first(2).num_layers == 2


def test_the_reference_is_transformers_own_and_all_its_weights_are_lively() -> None:
    model = transformers_model(model_of("deepseek_v4").config)

    fill(model, 0)

    assert {type(each).__module__.split(".")[0] for each in model.modules()} <= {"transformers", "torch"}
    assert not [each for each in model.modules() if "forward" in vars(each)]
    assert model.config._attn_implementation == "eager"
    assert all(parameter.numel() < 2 or parameter.std() > 0 for parameter in model.parameters())


def test_a_receipt_without_the_check_has_the_bytes_that_it_had() -> None:
    receipt = Receipt.model_validate(
        {
            "manifest_id": "m",
            "programs": {},
            "units": {},
            "builder": {},
            "target": {"backend": "fake", "machine": "x86_64"},
        }
    )

    assert b"model_check" not in receipt.dumps()
