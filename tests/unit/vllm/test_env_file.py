from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.vllm.env_file import parse_env_file


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
