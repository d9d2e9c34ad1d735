"""Keys: what is in them, what is not, and that nothing of the machine is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.compile.keys import graph_code_digest, unit_key
from aotgaudi.digest import Key
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, MhcEntry, PromptEntry, SamplerEntry, StepEntry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parse import parse_spec
from aotgaudi.spec.sampler import UPSTREAM_SETTINGS, SamplerSpec
from aotgaudi.spec.scheduler import DefragSpec
from tests.specs import spec_of as spec_with
from tests.workload import program_key

GOLDEN = Path(__file__).parents[2] / "golden" / "data" / "keys.json"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "vocab_size": 512,
}
LIMITS = {
    "max_num_seqs": 4,
    "max_num_prefill_seqs": 1,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "block_size": 16,
    "num_blocks": 32,
}
TARGET = Target(
    backend="cpu",
    machine="x86_64",
    isa=("avx2", "fma"),
    toolchain={"torch": "2.13", "compiler": "g++ 12"},
    flags={"cpp.threads": "1"},
)
ENTRY = PromptEntry(2, 32, 4)


def spec_of(config: Mapping[str, Any] = CONFIG, dtype: str = "float32", **limits: int) -> BuildSpec:
    return BuildSpec.model_validate(
        {
            "schema": "aotgaudi.spec/1",
            "model": {"name": "tiny", "dtype": dtype, "config": dict(config)},
            "limits": {**LIMITS, **limits},
        }
    )


BASE = program_key(ENTRY, spec_of(), TARGET)


def differing(key: Key) -> list[str]:
    return [name for name, _, _ in BASE.differences(key)]


def test_a_config_key_that_nobody_knows_is_in_the_program_key() -> None:
    """Every known key, limit and field of a spec has its test in ``test_key_mutation.py``."""
    key = program_key(ENTRY, spec_of({**CONFIG, "a_key_of_a_later_transformers": 1}), TARGET)

    assert differing(key) == ["model.model.config.a_key_of_a_later_transformers"]


def test_the_number_of_blocks_is_in_it_where_graphs_are_of_one_size() -> None:
    """A CPU's graphs leave it open: another KV size shares everything."""

    def key(backend: str, num_blocks: int) -> Key:
        return program_key(
            ENTRY, spec_of(num_blocks=num_blocks), TARGET.model_copy(update={"backend": backend})
        )

    for backend in ("cpu", "cuda", "fake"):
        assert key(backend, 32) == key(backend, 64)
    assert key("hpu", 32).differences(key("hpu", 64)) == (("limits.num_blocks", "32", "64"),)


ENTRIES: tuple[Entry, ...] = (PromptEntry(2, 32, 4), DecodeEntry(2, 32, 4), DefragEntry(8))


@pytest.mark.parametrize(
    ("entry", "name"),
    [(entry, name) for entry in ENTRIES for name in entry.columns()],
    ids=str,
)
def test_every_field_of_an_entry_is_in_it(entry: Entry, name: str) -> None:
    other = dataclasses.replace(entry, **{name: getattr(entry, name) + 1})  # type: ignore[type-var]

    before, after = (program_key(e, spec_of(), TARGET) for e in (entry, other))

    assert [row[0] for row in before.differences(after)] == [f"entry.{name}"]


def test_the_kind_of_an_entry_is_in_it() -> None:
    keys_of = {program_key(entry, spec_of(), TARGET).hex for entry in ENTRIES}

    assert len(keys_of) == len(ENTRIES)
    assert "entry.kind" in differing(program_key(DecodeEntry(2, 32, 4), spec_of(), TARGET))


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (SamplerEntry(2, 0.3, 0.95, 20, batch_changed=True), True),
        (SamplerEntry(2, 0.7, 0.9, 50, batch_changed=False), True),
        (SamplerEntry(3, 0.7, 0.9, 50, batch_changed=True), False),
        (SamplerEntry(2, 0.0, 0.9, 50, batch_changed=True), False),
        (SamplerEntry(2, 1.0, 1.0, 0, batch_changed=True), False),
        (SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True, min_p=0.1), False),
        (SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True, top_n_sigma=1.0), False),
        (SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True, presence_penalty=0.1), False),
        (SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True, num_logprobs=1), False),
    ],
)
def test_a_sampler_entry_is_keyed_by_its_signature(other: SamplerEntry, is_same: bool) -> None:
    entry = SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True)

    assert (program_key(entry, spec_of(), TARGET) == program_key(other, spec_of(), TARGET)) == is_same


def test_penalties_share_a_key_and_numbers_of_log_probabilities_do_not() -> None:
    def key(**others: float) -> str:
        entry = SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True, **others)  # type: ignore[arg-type]
        return program_key(entry, spec_of(), TARGET).hex

    assert key(presence_penalty=1.0) == key(frequency_penalty=-0.5) == key(repetition_penalty=1.3)
    assert key(num_logprobs=3) != key(num_logprobs=5)


HYPER = {
    "model_type": "deepseek_v4",
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
}


def hyper_key(entry: MhcEntry, **config: Any) -> Key:
    return program_key(entry, spec_of({**HYPER, **config}), TARGET)


HYPER_BASE = hyper_key(MhcEntry(64, 2, "attn"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("num_tokens", MhcEntry(65, 2, "attn")),
        ("n_splits", MhcEntry(64, 3, "attn")),
        ("sublayer", MhcEntry(64, 2, "ffn")),
    ],
)
def test_every_field_of_a_hyper_connection_is_in_it(name: str, other: MhcEntry) -> None:
    assert [row[0] for row in HYPER_BASE.differences(hyper_key(other))] == [f"entry.{name}"]


STEPS = (PromptEntry(1, 64, 2), DecodeEntry(4, 1, 8))


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_keyed_by_its_class_and_by_nothing_else_of_the_rule(step: StepEntry) -> None:
    def key_under(rule: str, num_sms: int) -> Key:
        spec = spec_with(
            config={**HYPER, "hidden_size": 1024},
            mhc={"rule": rule},
            target={"backend": "cpu", "num_sms": num_sms},
        )
        return program_key(step, spec, TARGET)

    base = key_under("sglang-pr25810", 8)

    assert dict(base.components)["entry.n_splits"] == "8"
    assert [row[0] for row in base.differences(key_under("sglang-pr25810", 4))] == ["entry.n_splits"]
    assert [row[0] for row in base.differences(key_under("one", 8))] == ["entry.n_splits"]
    assert key_under("vllm-collapsed", 9) == key_under("vllm-collapsed", 16)


def test_a_step_without_hyper_connections_has_no_class_in_its_key() -> None:
    llama = spec_of({"model_type": "llama", "hidden_size": 64, "max_position_embeddings": 512})

    for step in STEPS:
        assert "entry.n_splits" not in dict(program_key(step, llama, TARGET).components)


def test_a_unit_key_is_its_text_and_nothing_of_the_model() -> None:
    assert [row[0] for row in unit_key("a", TARGET).differences(unit_key("b", TARGET))] == ["graph"]
    assert not any(
        name.startswith(("model", "limits", "entry")) for name, _ in unit_key("a", TARGET).components
    )


def test_an_edit_of_any_graph_file_changes_the_digest_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_bytes(b"a = 1\n")
    (tmp_path / "b.py").write_bytes(b"")
    monkeypatch.setattr("aotgaudi.graphs.__path__", [str(tmp_path)])

    def digest() -> str:
        return graph_code_digest.__wrapped__()

    digests = [digest()]
    (tmp_path / "a.py").write_bytes(b"a = 2\n")
    digests.append(digest())
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    digests.append(digest())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").write_bytes(b"")
    digests.append(digest())
    (tmp_path / "folder" / "a.py").write_bytes(b"a = 1\n")
    digests.append(digest())
    (tmp_path / "folder").rename(tmp_path / "other")
    digests.append(digest())

    assert len(set(digests)) == 6


def test_no_component_names_this_machine() -> None:
    text = " ".join(value for _, value in BASE.components)

    assert not [word for word in (os.getcwd(), str(Path.home()), os.uname().nodename) if word in text]


_SPEC_WITH_A_CONFIG_FILE = """
schema = "aotgaudi.spec/1"
model = { name = "tiny", dtype = "float32", config = "config.json" }
limits = { max_num_seqs = 1, max_num_batched_tokens = 16, max_model_len = 16, block_size = 16, num_blocks = 1 }
"""


def test_the_order_of_a_config_does_not_matter() -> None:
    backwards = dict(reversed(CONFIG.items()))

    assert program_key(ENTRY, spec_of(backwards), TARGET) == BASE


def golden_keys() -> dict[str, str]:
    """Keys of fixed inputs; those that hold a digest of our own source are left out."""
    framed = {
        "nothing": [],
        "one": [("name", "value")],
        "two": [("name", "value"), ("other", "")],
        "shifted": [("nam", "evalue"), ("other", "")],
        "not ascii": [("größe", "16 Å")],
    }
    model = ModelSpec(name="tiny", dtype="float32", config=CONFIG)
    return {
        **{f"framing: {name}": Key.of(rows).hex for name, rows in framed.items()},
        "unit: cpu": unit_key("graph", TARGET).hex,
        "unit: another text": unit_key("graph\n", TARGET).hex,
        "unit: bare target": unit_key("graph", Target(backend="fake", machine="any")).hex,
        "model signature": model.signature().hex,
        **{
            f"entry: {entry}": entry.id
            for entry in (*ENTRIES, SamplerEntry(2, 0.7, 0.9, 50, batch_changed=True))
        },
        "manifest": _manifest_id(),
    }


def _manifest_id() -> str:
    from aotgaudi.manifest.manifest import Manifest

    text = _SPEC_WITH_A_CONFIG_FILE.replace('"config.json"', _inline(CONFIG))
    spec = parse_spec(text, Path())
    stated = {"sampler": SamplerSpec(settings=UPSTREAM_SETTINGS), "defrag": DefragSpec(enabled=True)}
    return Manifest.of(spec.model_copy(update=stated)).id  # With earlier releases' defaults.


def _inline(value: Mapping[str, Any]) -> str:
    def shown(item: Any) -> str:
        return _inline(item) if isinstance(item, dict) else json.dumps(item)

    return "{ " + ", ".join(f"{name} = {shown(item)}" for name, item in value.items()) + " }"


def test_keys_are_what_earlier_releases_made_of_the_same_inputs() -> None:
    """When this fails, every user's store is void: raise the schema in the key and regenerate the file."""
    assert golden_keys() == json.loads(GOLDEN.read_text(encoding="utf-8"))
