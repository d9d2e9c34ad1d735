from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.engine.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_CHARS, StructuredOutputs
from aotgaudi.errors import RequestError


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
