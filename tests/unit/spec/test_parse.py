from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.spec.parse import finite_json, json_floats, load_spec, parse_spec, read_config, spec_from_json

LIMITS = {
    "max_num_seqs": "2",
    "max_num_batched_tokens": "32",
    "max_model_len": "128",
    "block_size": "16",
    "num_blocks": "24",
}
CONFIG = '{ model_type = "llama", max_position_embeddings = 512 }'


def text_of(*, schema: str = "aotgaudi.spec/1", config: str = CONFIG, rest: str = "", **limits: str) -> str:
    lines = [f"{name} = {value}" for name, value in {**LIMITS, **limits}.items()]
    model = f'[model]\nname = "tiny"\ndtype = "float32"\nconfig = {config}\n'
    return f'schema = "{schema}"\n{model}[limits]\n' + "\n".join(lines) + f"\n{rest}\n"


def mistake_in(text: str, folder: Path = Path()) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_minimal_spec_has_the_documented_defaults() -> None:
    spec = parse_spec(text_of(), Path())

    assert (spec.bucketing.strategy, spec.bucketing.version) == ("exponential", "vllm-gaudi@091bbad")
    assert spec.defrag.padded_swaps == (8, 16, 32, 64, 128, 256, 512)
    assert [(s.temperature, s.top_p, s.top_k) for s in spec.sampler.settings] == [
        (0.0, 1.0, 0),
        (1.0, 1.0, 0),
        (0.7, 0.9, 50),
        (0.3, 0.95, 20),
        (1.2, 0.8, 100),
        (0.8, 0.85, 0),
        (0.7, 0.9, 50),
        (0.7, 0.9, 50),
    ]
    assert (
        str(spec.sampler.signature) == "min_p+penalties+logprobs+constraints"
    )  # No client is refused for one of these.
    assert (spec.target.backend, spec.target.isa) == ("cpu", "native")
    assert spec.limits.max_num_prefill_seqs == 1


@pytest.mark.parametrize(
    ("engine", "backend", "contiguous", "enabled"),
    [
        ("aotgaudi", "cpu", "false", False),
        ("aotgaudi", "cpu", "true", False),
        ("aotgaudi", "hpu", "false", False),
        ("aotgaudi", "hpu", "true", True),
        ("aotgaudi", "fake", "false", True),
        ("vllm", "cpu", "false", True),
        ("vllm", "hpu", "false", True),
        ("vllm", "hpu", "true", True),
    ],
)
def test_blocks_are_exchanged_by_default_where_that_can_gain_something(
    engine: str, backend: str, contiguous: str, enabled: bool
) -> None:
    def found(defrag: str = "") -> bool:
        rest = (
            f'[bucketing]\ncontiguous_pa = {contiguous}\n[scheduler]\nengine = "{engine}"\n'
            f'[defrag]\n{defrag}\n[target]\nbackend = "{backend}"'
        )
        return parse_spec(text_of(rest=rest), Path()).defrag.enabled

    assert found() is enabled
    assert (found("enabled = true"), found("enabled = false")) == (True, False)


def test_lists_become_tuples_and_integers_floats_where_the_value_wants_them() -> None:
    rest = (
        "[sampler]\nsettings = [{ temperature = 1, top_p = 1, top_k = 0 }]\n[defrag]\npadded_swaps = [8, 16]"
    )
    spec = parse_spec(text_of(rest=rest), Path())

    assert spec.defrag.padded_swaps == (8, 16)
    assert spec.sampler.settings[0].temperature == 1.0


def test_config_path_is_relative_to_the_spec_and_its_content_is_embedded(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "extra": [1, None]}
    (tmp_path / "configs" / "x.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "x.toml").write_text(text_of(config='"configs/x.json"'), encoding="utf-8")

    assert load_spec(tmp_path / "x.toml").model.config == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (text_of(max_num_seq="3"), "limits.max_num_seq: unknown key (did you mean 'max_num_seqs'?)"),
        (
            text_of(rest="[bucketing]\ncontigous_pa = true"),
            "bucketing.contigous_pa: unknown key (did you mean 'contiguous_pa'?)",
        ),
        (
            text_of(rest="[sampler]\nsettings = [{ temprature = 1.0, top_p = 1.0, top_k = 0 }]"),
            "sampler.settings.0.temprature: unknown key (did you mean 'temperature'?)",
        ),
        (
            text_of(rest="[target]\nzzz = 1"),
            "target.zzz: unknown key (known here: backend, execution_mode, isa, num_sms, profile)",
        ),
        (text_of(block_size='"16"'), "limits.block_size: is '16' (should be a valid integer)"),
        (text_of(block_size="16.0"), "limits.block_size: is 16.0 (should be a valid integer)"),
        (text_of(block_size="true"), "limits.block_size: is True (should be a valid integer)"),
        (text_of(max_num_seqs="0"), "limits.max_num_seqs: is 0 (should be greater than or equal to 1)"),
        (
            text_of(rest='[target]\nbackend = "tpu"'),
            "target.backend: is 'tpu' (should be 'cpu', 'cuda' or 'hpu')",
        ),
        (
            text_of(rest='[bucketing]\nstrategy = "expo"'),
            (
                "bucketing.strategy: is 'expo' "
                "(should be 'exponential', 'linear', 'padding_aware', 'file', 'unified' or 'tuned')"
            ),
        ),
        (
            text_of(rest="[bucketing.prompt.query_len]\nmix = 1"),
            "bucketing.prompt.query_len.mix: unknown key (did you mean 'min'?)",
        ),
        (
            text_of(rest="[bucketing.sliding]\nthreshhold = 1"),
            "bucketing.sliding.threshhold: unknown key (did you mean 'threshold'?)",
        ),
        (
            text_of(rest="[bucketing.decode.num_blocks]\nstep = 0"),
            "bucketing.decode.num_blocks.step: is 0 (should be greater than or equal to 1)",
        ),
        (
            text_of(rest='[bucketing]\nstrategy = "file"'),
            'bucketing.file: is missing (strategy = "file" and file = "PATH" go together)',
        ),
        (
            text_of(rest='[bucketing]\nstrategy = "file"\nfile = "absent.txt"'),
            "bucketing.file: absent.txt cannot be read: No such file or directory (a bucket file)",
        ),
        (text_of(rest="[bucketing]\nfile = 1"), "bucketing.file: is 1 (the path of a bucket file)"),
        (
            text_of(schema="aotgaudi.spec/9", max_num_seq="3"),
            "schema: is 'aotgaudi.spec/9' (should be 'aotgaudi.spec/1')",
        ),
        (
            text_of(max_num_batched_tokens="8"),
            (
                "limits.max_num_batched_tokens: is 8, less than block_size 16 "
                "(a prompt is computed in chunks of whole blocks: at least block_size tokens a step)"
            ),
        ),
        (
            text_of(num_blocks="7"),
            (
                "limits.num_blocks: is 7, too few for a sequence of max_model_len 128 tokens "
                "(at least 8 blocks of 16 tokens, or a max_model_len of at most 112)"
            ),
        ),
        (
            text_of(max_num_prefill_seqs="3"),
            "limits.max_num_prefill_seqs: is 3, more than max_num_seqs 2 (at most max_num_seqs)",
        ),
        (
            text_of(config='{ model_type = "llama", max_position_embeddings = 100 }'),
            (
                "limits.max_model_len: is 128, more than the model's positions "
                "(at most max_position_embeddings 100, or allow_long_max_model_len = true)"
            ),
        ),
        (
            text_of(config="{ max_position_embeddings = 512 }"),
            "model.config.model_type: is missing (the content of a Hugging Face config.json)",
        ),
        (
            text_of(config='{ model_type = "llama" }'),
            "model.config.max_position_embeddings: is missing (a positive integer)",
        ),
        (
            text_of(rest="[defrag]\npadded_swaps = [16, 8]"),
            "defrag.padded_swaps: is [16, 8] (ascending sizes, each one once)",
        ),
        (text_of(rest="[sampler]\nsettings = []"), "sampler.settings: is empty (at least one setting)"),
        (
            text_of(rest="[defrag]\nthreshold = 1979-05-27"),
            "defrag.threshold: is 1979-05-27 (a string, finite number, boolean, list or table)",
        ),
        (
            text_of(rest="[sampler]\nsettings = [{ temperature = nan, top_p = 1.0, top_k = 0 }]"),
            "sampler.settings.0.temperature: is nan (a string, finite number, boolean, list or table)",
        ),
        ("", "schema: is missing (it has no default)"),
    ],
)
def test_every_mistake_is_one_line_with_its_place_and_what_would_be_right(text: str, expected: str) -> None:
    assert mistake_in(text) == expected


def test_syntax_error_names_the_line() -> None:
    assert "line 2" in mistake_in('schema = "aotgaudi.spec/1"\n[model\n')


def test_a_config_is_read_as_python_reads_it(tmp_path: Path) -> None:
    text = '\N{ZERO WIDTH NO-BREAK SPACE}{"a": [0.0, Infinity], "b": {"c": NaN}, "d": -Infinity, "e": 1e999}'
    (tmp_path / "x.json").write_text(text, encoding="utf-8")

    assert finite_json(read_config(tmp_path / "x.json")) == {
        "a": [0.0, {"__float__": "Infinity"}],
        "b": {"c": {"__float__": "NaN"}},
        "d": {"__float__": "-Infinity"},
        "e": {"__float__": "Infinity"},
    }


@given(
    st.recursive(
        st.floats(allow_nan=False) | st.text(), lambda item: st.lists(item) | st.dictionaries(st.text(), item)
    )
)
def test_numbers_that_are_not_finite_come_back(config: object) -> None:
    assert json_floats(finite_json(config)) == config


def test_a_value_that_has_no_canonical_form_is_named(tmp_path: Path) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 256, "nested": [{"length": 10**30}]}
    (tmp_path / "x.json").write_text(json.dumps(config), encoding="utf-8")

    assert "model.config.nested.0.length: " in mistake_in(text_of(config='"x.json"'), tmp_path)


def test_missing_file_and_missing_config_are_readable(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "absent.toml")
    assert str(caught.value).startswith(f"{tmp_path / 'absent.toml'}: cannot be read: No such file")

    (tmp_path / "x.toml").write_text(text_of(config='"configs/x.json"'), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "x.toml")
    assert str(caught.value) == (
        f"{tmp_path / 'x.toml'}: model.config: {tmp_path / 'configs/x.json'} cannot be read: "
        "No such file or directory (the model's config.json)"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff", "is not UTF-8 text"),
        (b"[1]", "holds no JSON object"),
        (b'{"model_type": "llama", "max_position_embeddings": 512, "x": Infinity}', "x: is inf"),
        (b'{"model_type": "llama", "max_position_embeddings": 512, "x": 1180591620717411303424}', "integer"),
        (b'{"model_type": "llama", "max_position_embeddings": 512, "x": "\\ud800"}', "spec"),
    ],
)
def test_unusable_config_is_a_spec_error(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "x.json").write_bytes(content)

    assert expected in mistake_in(text_of(config='"x.json"'), tmp_path)


def test_a_bucket_file_is_embedded_and_its_path_is_not(tmp_path: Path) -> None:
    (tmp_path / "buckets.txt").write_text("(1, 16, 0)\n(1, 1, 8)\n", encoding="utf-8")
    text = text_of(rest='[bucketing]\nstrategy = "file"\nfile = "buckets.txt"')

    spec = parse_spec(text, tmp_path)

    assert spec.bucketing.file_text == "(1, 16, 0)\n(1, 1, 8)\n"
    assert "buckets.txt" not in json.dumps(spec.to_json())


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53) + 1, 2**53 - 1))
def test_config_numbers_survive_json_exactly(number: float, integer: int) -> None:
    value = parse_spec(text_of(), Path()).to_json()
    value["model"]["config"] |= {"number": number, "integer": integer}

    spec = spec_from_json(value)

    assert spec.model.config["number"] == number
    assert spec.model.config["integer"] == integer
    assert spec_from_json(spec.to_json()) == spec
