"""The parameters that constrain the text of an answer: OpenAI's `response_format`, and vLLM's parameters for more.

Each becomes a `StructuredOutputs`, or None if any text will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from aotgaudi.engine.sampling_params import StructuredOutputs
from aotgaudi.errors import RequestError
from aotgaudi.server.preprocess.body import Body

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older parameters. Each corresponds to a field of `StructuredOutputs`."""


def _check_schema(value: object) -> object:
    if value is None or isinstance(value, (str, bool, dict)):
        return value
    raise PydanticCustomError("json_schema", "Input should be a valid JSON Schema: an object, or its text")


JsonSchema = Annotated[Any, BeforeValidator(_check_schema)]
"""A JSON Schema, as a JSON value or as its text."""


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]

    def value(self) -> None:
        """Returns None."""
        return


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]

    def value(self) -> StructuredOutputs:
        """Returns it as a grammar."""
        return StructuredOutputs(json_object=True)


class NamedSchema(Body):
    """A JSON Schema and what it is called. The schema always binds, so `strict` changes nothing."""

    name: str
    schema_: JsonSchema = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """A JSON value of a schema; without a schema, any JSON object."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def value(self) -> StructuredOutputs:
        """Returns it as a grammar."""
        schema = self.json_schema.schema_
        if schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=cast("str", schema))


def _shape_of_format(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return f"<{kind}>" if kind in _FORMAT_TYPES else None


_FORMAT_TYPES = ("text", "json_object", "json_schema")
ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _shape_of_format,
        custom_error_type="format_type",
        custom_error_message=f"Input should be an object whose 'type' is one of {', '.join(map(repr, _FORMAT_TYPES))}",
    ),
]
"""The tags are in angle brackets, so that the paths in errors can omit them."""


class StructuredOutputsOption(Body):
    """vLLM's `structured_outputs`: one of these."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            *("disable_additional_properties", "disable_any_whitespace", "disable_fallback"),
            *("structural_tag", "whitespace_pattern"),
        }
    )

    json_: JsonSchema = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def value(self) -> StructuredOutputs:
        """Returns it as a grammar. Raises RequestError."""
        return StructuredOutputs(
            json=cast("str | None", self.json_),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
            json_object=bool(self.json_object),
        )


def structured_outputs_of(name: str, given: Any) -> StructuredOutputs | None:
    """Returns the constraint that the parameter `name` asks for; None if any text will do.

    Raises:
        RequestError: 400; the value cannot be used. Names the parameter.
    """
    try:
        if name in GUIDED:
            return StructuredOutputs(**{name.removeprefix("guided_"): given})
        return cast("StructuredOutputs | None", given.value())
    except RequestError as error:
        raise error.renamed({"structured_outputs": name}) from error
