"""Tools, the choice among them, and calls of tools in the bodies of requests. Functions are the only tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from aotgaudi.errors import RequestError
from aotgaudi.server.preprocess.body import MAX_ECHO_CHARS, NOT_SUPPORTED, Body, Ignored

MAX_TOOLS = 128  # OpenAI's
MAX_CALLS = 128  # of one message
MAX_TOOL_NAME_CHARS = 256
MAX_CALL_ID_CHARS = 256

ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
CallId = Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)]
ToolMode = Literal["none", "auto", "required"]


class Function(Body):
    """What a model may call. `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None


class Tool(Body):
    """One tool."""

    type: Literal["function"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        _refuse_other_tools(value)
        return value

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments."""
        return self.function.parameters or {"type": "object"}

    def as_variables(self) -> dict[str, Any]:
        """Returns what a chat template sees."""
        return {
            "type": self.type,
            "function": self.function.model_dump(exclude={"strict"}, exclude_unset=True),
        }


def _refuse_other_tools(value: object) -> None:
    """Refuses a tool, or a choice of a tool, that is not a function."""
    kind = value.get("type", "function") if isinstance(value, Mapping) else "function"
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError(
            "unsupported_parameter",
            "A tool of type '{kind}' {problem} (supported: function)",
            {"name": "type", "kind": kind[:MAX_ECHO_CHARS], "problem": NOT_SUPPORTED},
        )


class _ChosenFunction(Body):
    name: ToolName


class ChosenTool(Body):
    """The tool that the model has to call."""

    type: Literal["function"] = "function"
    function: _ChosenFunction

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        _refuse_other_tools(value)
        return value


def _shape_of_choice(value: object) -> str:
    """Tells apart a mode and a tool, for pydantic's unions."""
    return "<mode>" if isinstance(value, str) else "<tool>"


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Annotated[ToolMode, Tag("<mode>")] | Annotated[ChosenTool, Tag("<tool>")],
    Discriminator(_shape_of_choice),
]


def schema_of_calls(
    tools: Sequence[Tool], choice: ToolMode | ChosenTool | None, *, is_one: bool
) -> dict[str, Any] | None:
    """Returns the JSON Schema that makes a model call tools as `choice` demands; None if it demands no call.

    If `choice` names a function, the schema is that of its arguments. Otherwise it is, as in vLLM, an array of objects, each
    with the name and the parameters of a call. With `is_one`, the array has one object.

    Raises:
        RequestError: 400; two functions define a type of the same name differently.
    """
    if isinstance(choice, ChosenTool):
        return next(tool.arguments_schema for tool in tools if tool.function.name == choice.function.name)
    if choice != "required":
        return None
    definitions: dict[str, dict[str, Any]] = {}
    items = [_schema_of_call(tool, definitions) for tool in tools]
    limits = {"minItems": 1, **({"maxItems": 1} if is_one else {})}
    return {**definitions, "type": "array", **limits, "items": {"anyOf": items}}


def _schema_of_call(tool: Tool, definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the schema of a call. Moves its type definitions to `definitions`, because references begin at the root."""
    parameters = dict(tool.arguments_schema)
    for keyword in _DEFINITIONS:
        own = parameters.pop(keyword, {})
        shared = definitions.setdefault(keyword, {}) if own else {}
        for name, schema in own.items() if isinstance(own, dict) else ():
            if shared.setdefault(name, schema) != schema:
                raise RequestError(
                    f"the function {tool.function.name!r} defines {keyword}/{name} otherwise than another function; "
                    "with tool_choice 'required', give them different names",
                    param="tools",
                )
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


_DEFINITIONS = ("$defs", "definitions")


# Calls in earlier messages


class CalledFunction(Body):
    """A function, and its arguments as JSON. `parsed_arguments` is what OpenAI's client makes of them."""

    name: ToolName
    arguments: str = ""
    parsed_arguments: Ignored = None

    def as_variables(self) -> dict[str, Any]:
        """Returns the call as a chat template sees it. The arguments are an object, or unchanged text if they are not one.

        Clients send cut-off arguments back with a message that says so.
        """
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class Call(Body):
    """One call, as an answer had it. `index` is what clients keep of a stream's."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None

    def as_variables(self) -> dict[str, Any]:
        """Returns what a chat template sees."""
        return {"id": self.id, "type": self.type, "function": self.function.as_variables()}


Calls = Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)]
