from __future__ import annotations

import math
from typing import Any

import pytest

from aotgaudi.engine.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
    StructuredOutputs,
)
from aotgaudi.errors import RequestError


def test_defaults_filter_nothing() -> None:
    params = SamplingParams()

    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert params.max_tokens is None
    assert params.stop == ()


@pytest.mark.parametrize(
    "allowed",
    [
        {"temperature": 0},
        {"temperature": 2.0},
        {"top_p": 1e-9},
        {"top_k": 10**6},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"stop": ("x",) * MAX_STOP_STRINGS},
        {"stop_token_ids": (0, 1)},
        {"ignore_eos": True},
        {"min_p": 1},
        {"top_n_sigma": 100},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"logprobs": 0},
        {"logprobs": 20},
        {"min_tokens": 5, "max_tokens": 5},
        {"bad_words": ("x" * MAX_BAD_WORD_CHARS,) * MAX_BAD_WORDS},
        {"allowed_token_ids": (0, 5)},
        {"logit_bias": ((0, -100), (1, 100.0))},
        {"structured_outputs": StructuredOutputs(json_object=True)},
    ],
)
def test_the_edges_of_what_is_allowed_are_allowed(allowed: dict[str, Any]) -> None:
    params = SamplingParams(**allowed)

    assert {name: getattr(params, name) for name in allowed} == allowed


def test_the_signature_says_which_graph_serves_the_request() -> None:
    assert str(SamplingParams(temperature=1e-9, top_k=3).signature) == "greedy"
    assert str(SamplingParams(top_k=-1, seed=3).signature) == "random"
    assert (
        str(SamplingParams(min_p=0.1, repetition_penalty=2, logprobs=0).signature)
        == "min_p+penalties+logprobs"
    )
    assert str(SamplingParams(top_n_sigma=1).signature) == "top_n_sigma"


def test_constraints_need_a_graph_that_has_them() -> None:
    assert str(SamplingParams(temperature=0, bad_words=("x",)).signature) == "greedy+constraints"
    assert str(SamplingParams(min_tokens=3).signature) == "random+constraints"
    assert str(SamplingParams(logit_bias={3: 1.0}).signature) == "random+constraints"  # type: ignore[arg-type]


def test_a_least_length_needs_no_constraint_where_no_token_ends_the_output() -> None:
    assert str(SamplingParams(min_tokens=3, ignore_eos=True).signature) == "random"
    assert str(SamplingParams(min_tokens=3, ignore_eos=True, stop_token_ids=(1,)).signature) != "random"


def test_top_k_of_minus_one_is_off() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.inf),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 1.01),
        ("min_p", -0.1),
        ("top_n_sigma", -0.1),
        ("top_n_sigma", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("seed", 2**63),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 2**63),
        ("max_tokens", True),
        ("stop", ("",)),
        ("stop", "a string is not a tuple of strings"),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.0,)),
        ("ignore_eos", 1),
    ],
)
def test_a_refusal_names_the_parameter_the_value_and_what_is_allowed(param: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{param: value})

    assert refusal.value.param == param
    assert refusal.value.http_status == 400
    assert str(refusal.value).startswith(f"{param} must be ")
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("value", [10**4299, 10**5000, (-(10**5000),)], ids=["4300", "5001", "tuple"])
@pytest.mark.parametrize("param", ["max_tokens", "seed", "logprobs", "temperature", "stop_token_ids", "stop"])
def test_a_number_too_long_to_be_written_is_refused_in_few_words(param: str, value: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{param: value})

    assert refusal.value.param == param
    assert len(str(refusal.value)) < 200


# Structured outputs


def test_a_schema_may_be_given_as_a_value() -> None:
    schema: Any = {"properties": {"b": {}, "a": {"const": "é"}}}

    outputs = StructuredOutputs(json=schema)

    assert outputs == StructuredOutputs(json='{"properties":{"b":{},"a":{"const":"é"}}}')
    assert hash(outputs) == hash(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    "given",
    [{"json": "{}"}, {"regex": ""}, {"choice": ("a", "")}, {"grammar": "x"}, {"json_object": True}],
)
def test_the_json_form_makes_an_equal_value(given: dict[str, Any]) -> None:
    outputs = StructuredOutputs(**given)

    assert StructuredOutputs(**outputs.as_json()) == outputs
    assert outputs.as_json() == given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, and has none"),
        ({"json_object": False}, "has none"),
        ({"regex": "a", "json": "{}"}, "has json and regex"),
        ({"regex": 5}, "a string as regex, not int"),
        ({"choice": "ab"}, "a list of strings as choice, not str"),
        ({"choice": ()}, f"1 to {MAX_CHOICES} texts as choice, not 0"),
        ({"choice": ("a",) * (MAX_CHOICES + 1)}, f"not {MAX_CHOICES + 1}"),
        ({"choice": ("a" * MAX_GRAMMAR_CHARS, "b")}, f"at most {MAX_GRAMMAR_CHARS} characters as choice"),
        ({"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, f"at most {MAX_GRAMMAR_CHARS} characters as grammar"),
        ({"json": {"a": float("inf")}}, "this is not JSON"),
        ({"json": {"a": object()}}, "this is not JSON"),
    ],
)
def test_a_refusal_says_what_would_be_right(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match="structured_outputs") as refused:
        StructuredOutputs(**given)

    assert said in str(refused.value)
    assert refused.value.param == "structured_outputs"
