from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.wrap.flags import VARIABLES
from aotgaudi.wrap.from_vllm.variables import OtherVariables, is_looked_at, parse_env_file


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


def test_lines_of_all_forms() -> None:
    text = """
# a comment
VLLM_A=1
export VLLM_B = 'two words'
  VLLM_C="3"   # why
VLLM_D=
VLLM_A=4
PT_HPU_E=a b
"""
    assert parse_env_file(text, "e") == {
        "VLLM_A": "4",
        "VLLM_B": "two words",
        "VLLM_C": "3",
        "VLLM_D": "",
        "PT_HPU_E": "a b",
    }


def test_variables_of_others_are_left_as_they_stand() -> None:
    assert parse_env_file("MSG=it's $5\nURL=http://x/#y", "e") == {"MSG": "it's $5", "URL": "http://x/#y"}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("hello", "is no assignment"),
        ("1A=2", "is no assignment"),
        ("=2", "is no assignment"),
        ("VLLM_A='x", "no closing quotation"),
        ("VLLM_A=$B", "has '$B', which a shell would expand"),
        ("VLLM_A=${B}", "has '${B}', which a shell would expand"),
    ],
)
def test_mistakes_come_with_the_line(line: str, what: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_env_file(f"# first\n{line}\n", "some.env")

    assert (caught.value.where, caught.value.problem) == ("some.env:2", what)


@given(
    st.dictionaries(
        st.from_regex(r"VLLM_[A-Z_]{1,10}", fullmatch=True), st.from_regex(r"[\w./=-]{0,12}", fullmatch=True)
    )
)
def test_plain_values_read_back(values: dict[str, str]) -> None:
    assert parse_env_file("\n".join(f"{name}={value}" for name, value in values.items()), "e") == values
