from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.commands.words import is_true, parse_fraction, parse_integer, parse_tokens
from aotgaudi.errors import SpecError
from aotgaudi.spec.limits import LARGEST_LIMIT


@pytest.mark.parametrize("text", ["true", "t", "1", "yes", "y", "on", "TRUE", "Yes", "oN"])
def test_upstreams_true_words_are_true_in_any_case(text: str) -> None:
    assert is_true(text)


@pytest.mark.parametrize("text", ["", "0", "false", "2", "enabled", "tru", " true"])
def test_every_other_text_is_false(text: str) -> None:
    assert not is_true(text)


@given(st.integers(0, LARGEST_LIMIT))
def test_integers_read_back(value: int) -> None:
    assert parse_integer("N", str(value)) == value


def test_blanks_and_leading_zeros_do_not_matter() -> None:
    assert parse_integer("N", " 007 ") == 7
    assert parse_integer("N", "0" * 50 + "3") == 3
    assert parse_integer("N", "000") == 0


@pytest.mark.parametrize(
    "text",
    ["abc", "1.5", "-3", "10**30", "", " ", "1e3", "0x10", "1_000", "+5", "٣", "9" * 400, "2147483648"],
)
def test_malformed_integers_are_refused_with_the_variable_named(text: str) -> None:
    with pytest.raises(SpecError, match=r"^VLLM_X: is .* \(an integer from 0 to 2147483647\)$") as caught:
        parse_integer("VLLM_X", text)

    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("32K", 32768),
        ("1M", 2**20),
        ("1m", 10**6),
        ("25.6k", 25600),
        (" 8k ", 8000),
    ],
)
def test_human_forms_of_token_counts_are_vllms(text: str, tokens: int) -> None:
    assert parse_tokens("--max-model-len", text) == tokens


@pytest.mark.parametrize(
    "text", ["1.5K", "k", "8kb", "8 k", "-1", "auto", "0", "0k", "9T", "1." + "0" * 90 + "k"]
)
def test_other_forms_of_token_counts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--max-model-len: is "):
        parse_tokens("--max-model-len", text)


def test_a_binary_suffix_after_a_fraction_names_the_decimal_one() -> None:
    with pytest.raises(SpecError, match=r"1\.5k\)$"):
        parse_tokens("N", "1.5K")


def test_fractions_and_their_ends() -> None:
    assert parse_fraction("F", "0.9", includes_zero=False, includes_one=False) == 0.9
    assert parse_fraction("F", "0", includes_zero=True, includes_one=False) == 0
    assert parse_fraction("F", "1", includes_zero=False, includes_one=True) == 1


@pytest.mark.parametrize("text", ["0", "1", "1.1", "-0.1", "nan", "inf", "half", "", "0_1", "9" * 400])
def test_fractions_outside_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"^F: is .* \(a number above 0 and below 1\)$"):
        parse_fraction("F", text, includes_zero=False, includes_one=False)
