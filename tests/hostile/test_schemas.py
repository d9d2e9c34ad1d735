"""Grammars of structured output that try to take time or memory: from the body to the mask of the last token."""

from __future__ import annotations

import json
from typing import Any

from tests.hostile import attackers
from tests.hostile.attackers import CHAT, COMPLETIONS, Refused
from tests.hostile.conftest import Trial

SECONDS = 6.0
MANY = 10_000


def _of(kind: str, value: object, name: str = "structured_outputs") -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 8, "temperature": 0, name: {kind: value}}


def _schema(schema: object) -> dict[str, Any]:
    return _of("json", schema)


def _object(**properties: object) -> dict[str, Any]:
    return _schema({"type": "object", "properties": properties, "required": list(properties)})


def _nested(depth: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema


def _rules(num: int) -> str:
    names = [f"r{number}" for number in range(num)]
    return "\n".join([f"start: {' '.join(names)}", *(f'{name}: "{name}"*' for name in names)])


def _body(asked: dict[str, Any]) -> bytes:
    return json.dumps(asked).encode()


def _doubling(keyword: str, depth: int) -> dict[str, Any]:
    """A schema that refers twice to one that refers twice to another: 2 to the power of `depth` when written out."""
    parts = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**parts, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
PROPERTIES = {f"p{number}": {"type": "integer"} for number in range(MANY)}
CHOICES = [
    {"anyOf": [{"type": "object", "properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(12)
]
REFUSED: dict[str, Refused] = {
    "nested too deep to be read": (_body(_schema("[" * MANY)), "structured_outputs", ""),
    "a body nested too deep": (_body(_schema(_nested(900))), None, "line 1 column"),
    "10,000 properties": (_body(_schema({"properties": PROPERTIES})), "structured_outputs", "131072"),
    "10,000 choices": (_body(_of("choice", ["x"] * MANY)), "structured_outputs", "2048"),
    "an enum of a million": (_body(_schema({"enum": list(range(100_000))})), "structured_outputs", "131072"),
    "references in a circle": (
        _body(_schema({**CIRCLE, "$ref": "#/$defs/a"})),
        "structured_outputs",
        "no text satisfies it",
    ),
    "a reference to nothing": (
        _body(_object(a={"$ref": "#/$defs/a"})),
        "structured_outputs",
        "/properties/a",
    ),
    "a reference to itself": (_body(_schema({"$ref": "#"})), "structured_outputs", "no text"),
    "a reference to the network": (
        _body(_object(a={"$ref": "http://127.0.0.1/x"})),
        "structured_outputs",
        "/properties/a",
    ),
    "every choice of every choice": (_body(_schema({"allOf": CHOICES})), "structured_outputs", "too large"),
    "an unknown format": (
        _body(
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"type": "array", "items": {"type": "string", "format": "nope"}},
                    },
                },
            }
        ),
        "response_format",
        "/items",
    ),
    "a repetition of repetitions": (
        _body(_of("regex", "((a{1000}){1000}){1000}")),
        "structured_outputs",
        "too ",
    ),
    "as many ways as subsets": (_body(_of("regex", "(a?){500}a{500}")), "structured_outputs", "lexer"),
    "an open group": (_body(_of("regex", "(" * MANY)), "structured_outputs", "regex"),
    "bytes that are no text": (
        b'{"prompt":"a","structured_outputs":{"regex":"\xff\xfe"}}',
        None,
        "line 1 column",
    ),
    "half a surrogate pair": (
        b'{"prompt":"a","structured_outputs":{"regex":"\\ud800"}}',
        None,
        "line 1 column",
    ),
    "a grammar without an end": (_body(_of("grammar", "start: start")), "structured_outputs", "no text"),
}
TAKEN = {
    "100 levels": _schema(_nested(100)),
    "an enum of 5,000": _schema({"enum": [f"value {number}" for number in range(5000)]}),
    "a million items": _object(
        a={"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**7}
    ),
    "a text of a GB": _object(a={"type": "string", "minLength": 10**9}),
    "a pattern that counts": _object(a={"type": "string", "pattern": "^(.*a.{20}){3}$"}),
    "a repetition of 100,000": _of("regex", "[ab]{100000}"),
    "a look back": _of("regex", "(.*a.{20}){3}"),
    "an object of a circle": _schema(
        {**CIRCLE, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}
    ),
    "a tree of itself": _object(l={"$ref": "#"}, r={"$ref": "#"}),
    "2^24 integers": _schema(_doubling("allOf", 24)),
    "2^30 items": _schema(_doubling("prefixItems", 30)),
    "1,000 rules": _of("grammar", _rules(1000)),
    "every reading of a text": _of("grammar", 'start: a\na: a a | "x" | ""'),
}


def test_grammars_that_take_time_or_memory(trial: Trial) -> None:
    chats = [(CHAT, one) for name, one in REFUSED.items() if name == "an unknown format"]
    refused = [(COMPLETIONS, one) for name, one in REFUSED.items() if name != "an unknown format"]
    taken = [(COMPLETIONS, _body(asked)) for asked in TAKEN.values()]
    with trial() as it:
        it.attack(attackers.ask_for_grammars, [*chats, *refused], taken, SECONDS, times=3)
