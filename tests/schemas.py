"""JSON Schemas that structured output is tested with.

They are of the kinds of the public JSON-Schema-Test-Suite (one keyword at a time) and of JSONSchemaBench (what applications
ask for: arguments of functions, records, documents), as far as `llguidance` supports the keywords.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_STR: Schema = {"type": "string"}
_INT: Schema = {"type": "integer"}
_NUM: Schema = {"type": "number"}
_BOOL: Schema = {"type": "boolean"}
_NULL: Schema = {"type": "null"}
_SHORT: Schema = {"type": "string", "maxLength": 8}
_WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,8}$"}


def record(required: int | None = None, **properties: Schema) -> Schema:
    """An object with these properties and no others, of which the first `required` (all) must be there."""
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names if required is None else names[:required],
        "additionalProperties": False,
    }


def array(items: Schema, least: int | None = None, most: int | None = None) -> Schema:
    """An array of these items."""
    bounds = {"minItems": least, "maxItems": most}
    return {
        "type": "array",
        "items": items,
        **{name: value for name, value in bounds.items() if value is not None},
    }


def _scalars() -> Iterator[Schema]:
    yield from (_STR, _INT, _NUM, _BOOL, _NULL)
    yield from (
        {"type": ["string", "null"]},
        {"type": ["integer", "boolean"]},
        {"type": ["number", "string", "null"]},
    )
    for value in (0, -7, 3.25, "", "a b", 'quote " and \\', "né😀", True, None, [1, "a"], {"a": {"b": []}}):
        yield {"const": value}
    yield from (
        {"enum": ["red", "amber", "green"]},
        {"enum": [1, 2, 3]},
        {"enum": ["a", 1, None, True, [], {}]},
    )
    yield {"enum": [f"value-{i}" for i in range(60)]}
    yield {"type": "string", "enum": ["yes", "no"]}


def _strings() -> Iterator[Schema]:
    for least, most in ((0, 0), (0, 3), (3, None), (5, 5), (2, 9), (None, 20)):
        bounds = {"minLength": least, "maxLength": most}
        yield {"type": "string", **{name: value for name, value in bounds.items() if value is not None}}
    for pattern in (
        "^a+$",
        "^[A-Z]{2}[0-9]{4}$",
        r"^\d{3}-\d{4}$",
        "^(north|south)-(east|west)$",
        "^[^x]{1,6}$",
        r"^\w+@\w+\.com$",
        "^$",
        "^(ab|cd)*e?$",
        r"^#[0-9a-fA-F]{6}$",
        "^[a-zé]{2,5}$",
    ):
        yield {"type": "string", "pattern": pattern}
    for form in ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname"):
        yield {"type": "string", "format": form}


def _numbers() -> Iterator[Schema]:
    for least, most in ((0, 9), (10, 19), (-5, 5), (1, 1000), (100, 100), (-1000, -10), (0, None), (None, 0)):
        bounds = {"minimum": least, "maximum": most}
        yield {"type": "integer", **{name: value for name, value in bounds.items() if value is not None}}
    for least, most in ((0, 1), (-1.5, 1.5), (0.1, 0.2), (99.5, 1000)):
        yield {"type": "number", "minimum": least, "maximum": most}
    yield {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}
    yield {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    yield from ({"type": "integer", "multipleOf": step} for step in (2, 5, 10))


def _arrays() -> Iterator[Schema]:
    yield {"type": "array"}
    for items in (_INT, _WORD, _BOOL, {"enum": ["a", "b"]}, record(x=_INT), array(_INT, 1, 2)):
        yield array(items, None, 4)
        yield array(items, 2, 3)
    yield array(_NUM, 3, 3)
    yield array({"anyOf": [_INT, _WORD]}, 1, 5)
    yield {"type": "array", "maxItems": 0}
    yield {"type": "array", "prefixItems": [_INT, _WORD], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [_INT, _WORD], "items": _BOOL, "minItems": 2, "maxItems": 4}
    yield {"type": "array", "prefixItems": [{"const": "point"}, _NUM, _NUM], "minItems": 3, "items": False}


def _objects() -> Iterator[Schema]:
    yield {"type": "object"}
    yield {"type": "object", "additionalProperties": False}
    for value in (_INT, _WORD, _BOOL):
        yield {"type": "object", "additionalProperties": value}
        yield {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": _INT}
    for required in range(5):
        yield record(required, a=_INT, b=_WORD, c=_BOOL, d=_NULL)
    yield {
        "type": "object",
        "properties": {"b": _INT, "a": _INT},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    yield {"type": "object", "properties": {"a": _INT}, "required": ["a", "z"], "additionalProperties": _INT}
    yield {"type": "object", "patternProperties": {"^x-": _INT}, "additionalProperties": False}
    yield {"type": "object", "patternProperties": {"^s": _WORD, "^n": _INT}, "additionalProperties": False}
    yield record(**{"a b": _INT, 'q"': _WORD, "né": _BOOL, "": _NULL})
    yield record(a=record(b=record(c=record(d=_INT))))
    yield record(a=array(record(b=array(record(c=_INT), 1, 2)), 1, 2))


def _combined() -> Iterator[Schema]:
    yield {"anyOf": [_INT, _WORD]}
    yield {"anyOf": [record(a=_INT), record(b=_WORD)]}
    yield {
        "anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 5, "maximum": 9}, _NULL]
    }
    yield {"oneOf": [_INT, _BOOL]}
    yield {"oneOf": [record(kind={"const": "cat"}, lives=_INT), record(kind={"const": "dog"}, name=_WORD)]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]}
    yield {
        "allOf": [
            {"type": "object", "properties": {"a": _INT}, "required": ["a"]},
            {"additionalProperties": False, "properties": {"a": {}}},
        ]
    }
    yield record(value={"anyOf": [_INT, _NULL]}, other={"anyOf": [array(_INT, 1, 2), _WORD]})
    for depth in range(1, 6):
        inner: Schema = {"anyOf": [_INT, _BOOL]}
        for _ in range(depth):
            inner = record(next={"anyOf": [inner, _NULL]})
        yield inner


def _references() -> Iterator[Schema]:
    point = record(x=_INT, y=_INT)
    yield {"$defs": {"point": point}, "$ref": "#/$defs/point"}
    yield {"definitions": {"point": point}, **array({"$ref": "#/definitions/point"}, 1, 3)}
    yield {"$defs": {"p": point}, **record(start={"$ref": "#/$defs/p"}, end={"$ref": "#/$defs/p"})}
    yield {"$defs": {"word": _WORD, "words": array({"$ref": "#/$defs/word"}, 1, 3)}, "$ref": "#/$defs/words"}
    tree = record(1, value=_INT, left={"$ref": "#/$defs/tree"}, right={"$ref": "#/$defs/tree"})
    yield {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}
    linked = record(value=_INT, next={"anyOf": [{"$ref": "#/$defs/node"}, _NULL]})
    yield {"$defs": {"node": linked}, "$ref": "#/$defs/node"}
    yield record(1, name=_WORD, children=array({"$ref": "#"}, 0, 1))
    expression = {"anyOf": [_INT, array({"$ref": "#/$defs/e"}, 2, 2)]}
    yield {"$defs": {"e": expression}, "$ref": "#/$defs/e"}


_ADDRESS = record(
    2,
    street=_WORD,
    city=_WORD,
    zip={"type": "string", "pattern": "^[0-9]{5}$"},
    country={"enum": ["CH", "DE", "JP"]},
)
_MONEY = record(
    amount={"type": "number", "minimum": 0, "maximum": 9999}, currency={"enum": ["EUR", "USD", "CHF"]}
)
_DAY = {"type": "string", "format": "date"}

_APPLICATIONS: dict[str, Schema] = {
    "weather": record(
        1,
        location=_WORD,
        unit={"enum": ["celsius", "fahrenheit"]},
        days={"type": "integer", "minimum": 1, "maximum": 14},
    ),
    "send mail": record(
        3,
        to=array({"type": "string", "format": "email"}, 1, 2),
        subject=_SHORT,
        body=_SHORT,
        cc=array(_WORD, None, 1),
    ),
    "tool calls": array(
        {
            "anyOf": [
                record(name={"const": "now"}, arguments=record()),
                record(name={"const": "wait"}, arguments=record(seconds=_INT)),
            ]
        },
        1,
        3,
    ),
    "customer": record(
        2, id={"type": "string", "format": "uuid"}, name=_WORD, address=_ADDRESS, tags=array(_WORD, None, 3)
    ),
    "invoice": record(
        number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        date=_DAY,
        total=_MONEY,
        lines=array(
            record(item=_WORD, count={"type": "integer", "minimum": 1, "maximum": 99}, price=_MONEY), 1, 2
        ),
    ),
    "geojson": record(
        type={"const": "Feature"},
        geometry=record(type={"const": "Point"}, coordinates=array(_NUM, 2, 3)),
        properties={"type": "object", "additionalProperties": _WORD},
    ),
    "package": record(
        2,
        name={"type": "string", "pattern": "^[a-z][a-z-]{0,9}$"},
        version={"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        private=_BOOL,
        dependencies={"type": "object", "additionalProperties": _WORD},
    ),
    "pod": record(
        apiVersion={"const": "v1"},
        kind={"const": "Pod"},
        metadata=record(1, name=_WORD, labels={"type": "object", "additionalProperties": _WORD}),
        spec=record(containers=array(record(name=_WORD, image=_WORD), 1, 2)),
    ),
    "patch": array(
        {
            "anyOf": [
                record(op={"const": "add"}, path=_SHORT, value=_INT),
                record(op={"const": "remove"}, path=_SHORT),
            ]
        },
        1,
        3,
    ),
    "ticket": record(
        3,
        id=_INT,
        title=_SHORT,
        state={"enum": ["open", "closed"]},
        labels=array({"enum": ["bug", "docs"]}, None, 2),
        assignee={"anyOf": [_WORD, _NULL]},
    ),
    "form": record(
        fields=array(
            {
                "oneOf": [
                    record(type={"const": "text"}, label=_WORD),
                    record(type={"const": "number"}, label=_WORD, max=_INT),
                ]
            },
            1,
            3,
        )
    ),
    "schedule": {
        "type": "object",
        "properties": {
            day: array({"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}, None, 1)
            for day in ("mon", "tue", "wed", "thu", "fri")
        },
        "required": ["mon"],
        "additionalProperties": False,
    },
}


def _wide() -> Iterator[Schema]:
    """Objects of many optional properties."""
    for num in (5, 10, 20, 40):
        yield record(1, **{f"p{i}": (_INT, _WORD, _BOOL)[i % 3] for i in range(num)})


def _nested() -> Iterator[Schema]:
    """Every small schema as the property of an object, and as the items of an array."""
    for inner in (*list(_numbers())[::2], *list(_strings())[::3], *list(_combined())[:6]):
        yield record(1, value=inner, flag=_BOOL)
        yield array(inner, 1, 3)


def all_schemas() -> list[Schema]:
    """Returns 160 schemas."""
    parts = (_scalars, _strings, _numbers, _arrays, _objects, _combined, _references, _wide)
    found = [schema for part in parts for schema in part()]
    found += _APPLICATIONS.values()
    found += list(_nested())[: 160 - len(found)]
    return found
