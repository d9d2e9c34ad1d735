from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.commands.env_file import EnvFile, EnvFileStyle, parse_env_file
from aotgaudi.commands.flags import VARIABLES, is_looked_at
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.command import OtherVariables


def reason(name: str, *, harmless: bool) -> str:
    others = OtherVariables.of([name])
    remarks = others.harmless if harmless else others.unknown
    assert [remark.name for remark in remarks] == [name]
    return remarks[0].text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("VLLM_PORT", "where and how the server listens"),
        ("VLLM_LOGGING_LEVEL", "logs, metrics and traces"),
        ("VLLM_IMAGE_TAG", "which image or build this is"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "where files are kept"),
        ("VLLM_ROCM_USE_AITER_MOE", "of other devices"),
        ("VLLM_SERVICE_HOST", "set by Kubernetes for a service"),
        ("VLLM_LLAMA_PORT_8000_TCP_ADDR", "set by Kubernetes for a service"),
    ],
)
def test_what_changes_nothing_has_a_reason(name: str, why: str) -> None:
    assert reason(name, harmless=True) == why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("VLLM_DISABLE_MARK_SCALES_AS_CONST", "changes how quantized layers are computed"),
        ("VLLM_HPU_MULTI_MODEL_CONFIG", "names several models for one process"),
        ("VLLM_ATTENTION_BACKEND", "chooses the attention's code"),
        ("RUNTIME_SCALE_PATCHING", "changes how quantized layers are computed"),
        ("PT_HPU_WEIGHT_SHARING", "the bridge compiles other code"),
        ("VLLM_NEW_IN_SOME_RELEASE", "not known"),
        ("PT_HPU_NEW_IN_SOME_RELEASE", "not known"),
        ("VLLM_CONTIGOUS_PA", "not known: did you mean VLLM_CONTIGUOUS_PA?"),
        ("VLLM_DECODE_BS_BUKET_MAX", "not known: did you mean VLLM_DECODE_BS_BUCKET_MAX?"),
        ("PT_HPU_LAZYMODE", "not known: did you mean PT_HPU_LAZY_MODE?"),
        ("PT_HPU_RECIPE_CACHE_CONFG", "not known: did you mean PT_HPU_RECIPE_CACHE_CONFIG?"),
        ("VLLM_LOGING_LEVEL", "not known: did you mean VLLM_LOGGING_LEVEL?"),
    ],
)
def test_everything_else_may_change_what_is_warm(name: str, why: str) -> None:
    assert reason(name, harmless=False).startswith(why)


def test_no_variable_that_a_spec_takes_is_harmless_or_has_a_reason() -> None:
    taken = [name for name, variable in VARIABLES.items() if variable.effect == "taken"]

    others = OtherVariables.of(taken)

    assert others.harmless == ()
    assert len(others.unknown) == len(taken) > 60
    assert all(remark.text.startswith("not known") for remark in others.unknown)


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("QUANT_CONFIG", True),
        ("VLLM_X", True),
        ("PT_HPU_X", True),
        ("HPU_ALIGNED_SCALE", True),
        ("HOME", False),
        ("CUDA_HOME", False),
        ("TORCHINDUCTOR_CACHE_DIR", False),
    ],
)
def test_other_programs_variables_are_left_alone(name: str, is_ours: bool) -> None:
    assert is_looked_at(name) is is_ours


CALLER = {"VLLM_SET": "here", "VLLM_QUOTED": '"x"'}
LINES = [
    ("VLLM_A=1", "1", "1"),
    ("  VLLM_A=1", "1", "1"),
    ("VLLM_A=1\r", "1", "1"),
    ("VLLM_A=", "", ""),
    ("VLLM_A=a b ", "a b ", "a b"),
    ('VLLM_A="true"', '"true"', "true"),
    ("VLLM_A='a b'", "'a b'", "a b"),
    ("VLLM_A=1 # why", "1 # why", "1"),
    ("VLLM_A= # why", " # why", ""),
    ("VLLM_A=a#b", "a#b", "a#b"),
    ('VLLM_A="a # b"  # why', '"a # b"  # why', "a # b"),
    ("VLLM_A='a' 'b'", "'a' 'b'", SpecError),
    ("VLLM_A= 1", " 1", "1"),
    ("VLLM_A = 1", SpecError, "1"),
    ("export VLLM_A=1", SpecError, "1"),
    ("VLLM_A='x", "'x", SpecError),
    ("VLLM_A=$B", "$B", SpecError),
    ("VLLM_A='$B'", "'$B'", "$B"),
    ('VLLM_A="a\\"b"', '"a\\"b"', 'a"b'),
    ("VLLM_SET", "here", "here"),
    ("VLLM_QUOTED", '"x"', '"x"'),
    ("VLLM_UNSET", None, None),
    ("hello there", SpecError, SpecError),
    ("1.A=2", "2", SpecError),
    ("=2", SpecError, SpecError),
    ("#VLLM_A=1", None, None),
    ("\N{ZERO WIDTH NO-BREAK SPACE}VLLM_A=1", "1", "1"),
    ("VLLM_A=1\x85 2", "1\x85 2", "1\x85 2"),
]
"""A line; its only value as docker and kubectl read it, and as compose does."""


@pytest.mark.parametrize(("line", "docker", "compose"), LINES)
@pytest.mark.parametrize("style", ["docker", "compose"])
def test_a_line_of_an_environment_file(
    line: str,
    docker: str | type[SpecError] | None,
    compose: str | type[SpecError] | None,
    style: EnvFileStyle,
) -> None:
    expected = docker if style == "docker" else compose

    if expected is SpecError:
        with pytest.raises(SpecError, match=r"^some\.env:1: "):
            parse_env_file(line, "some.env", CALLER, style)
    else:
        found = parse_env_file(line, "some.env", CALLER, style).values
        assert list(found.values()) == ([] if expected is None else [expected])


def test_the_last_line_for_a_name_counts() -> None:
    assert parse_env_file("# first\n\nVLLM_A=1\nVLLM_A=4\n", "e", {}).values == {"VLLM_A": "4"}


def test_quotes_and_comments_in_values_are_noted_in_one_line() -> None:
    text = 'VLLM_A="true"\nPT_HPU_B=1 # lazy\nMSG="hi"\nVLLM_C=1\n'

    (note,) = parse_env_file(text, "quoted.env", {}).notes

    assert "VLLM_A, PT_HPU_B are part of the value" in note
    assert "--env-file-style compose" in note
    assert parse_env_file(text, "quoted.env", {}, "compose").notes == ()


def test_names_alone_that_are_not_set_are_noted() -> None:
    text = "HF_TOKEN\nHABANA_VISIBLE_DEVICES\nPT_HPU_LAZY_MODE=1\n"

    found = parse_env_file(text, "bare-names.env", {"HF_TOKEN": "x"})

    assert found.values == {"HF_TOKEN": "x", "PT_HPU_LAZY_MODE": "1"}
    assert found.notes == (
        "bare-names.env: skipped HABANA_VISIBLE_DEVICES: a name alone takes this environment's value, and there is none",
    )


@pytest.mark.parametrize("style", ["docker", "compose"])
def test_variables_of_others_are_left_as_they_stand(style: EnvFileStyle) -> None:
    text = "MSG=it's $5\nURL=http://x/#y"

    assert parse_env_file(text, "e", {}, style) == EnvFile({"MSG": "it's $5", "URL": "http://x/#y"})


@given(
    st.dictionaries(
        st.from_regex(r"VLLM_[A-Z_]{1,10}", fullmatch=True), st.from_regex(r"[\w./=-]{0,12}", fullmatch=True)
    ),
    st.sampled_from(["docker", "compose"]),
)
def test_plain_values_read_back(values: dict[str, str], style: EnvFileStyle) -> None:
    text = "\n".join(f"{name}={value}" for name, value in values.items())

    assert parse_env_file(text, "e", {}, style) == EnvFile(values)
