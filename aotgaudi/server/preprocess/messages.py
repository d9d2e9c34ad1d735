"""Messages of a chat, and the tools that a model may call, as clients send them and as a chat template sees them.

Functions are the only tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from aotgaudi.errors import RequestError
from aotgaudi.server.preprocess.body import (
    MAX_ECHO_CHARS,
    NOT_SUPPORTED,
    Body,
    Ignored,
    NoValue,
    invalid,
    shape_of_text,
)

MAX_TEXT_PARTS = 1024  # of one message
_MISSING = "Missing required parameter: '{name}'"
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


class _OfFunction(Body):
    """A tool, or the choice of one. Refuses what is not a function."""

    type: Literal["function"] = "function"

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        kind = value.get("type", "function") if isinstance(value, Mapping) else "function"
        if isinstance(kind, str) and kind != "function":
            raise _other_type("A tool of type '{kind}' {problem} (supported: function)", kind)
        return value


def _other_type(message: str, kind: str, problem: str = NOT_SUPPORTED) -> PydanticCustomError:
    values = {"name": "type", "kind": kind[:MAX_ECHO_CHARS], "problem": problem}
    return PydanticCustomError("unsupported_parameter", message, values)


class Tool(_OfFunction):
    """One tool."""

    function: Function

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


class _ChosenFunction(Body):
    name: ToolName


class ChosenTool(_OfFunction):
    """The tool that the model has to call."""

    function: _ChosenFunction


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


# Messages


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


class TextPart(Body):
    """One part of a message's content; only text is served."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        kind = value.get("type", "text") if isinstance(value, Mapping) else "text"
        if not isinstance(kind, str) or kind == "text":
            return value
        problem = NOT_SUPPORTED if kind in _OTHER_PARTS else "is not known"
        raise _other_type("A content part of type '{kind}' {problem} (supported: text)", kind, problem)


_OTHER_PARTS = frozenset(
    {
        *("audio_embeds", "audio_url", "file", "image_embeds", "image_pil", "image_url", "input_audio"),
        *("input_image", "input_text", "output_text", "refusal", "thinking", "video_url"),
    }
)


MessageContent = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextPart], Field(max_length=MAX_TEXT_PARTS, fail_fast=True), Tag("<list>")],
    Discriminator(shape_of_text),
]


class Message(Body):
    """One message. The unsupported and ignored fields are those of answers that clients send back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    name: str | None = None
    tool_calls: Calls | None = None
    tool_call_id: CallId | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    refusal: NoValue = None
    audio: NoValue = None
    function_call: NoValue = None
    annotations: Ignored = None
    parsed: Ignored = None

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        """Checks that the message has the fields that its role needs."""
        if self.content is None and self.role != "assistant":
            raise invalid("content", _MISSING)
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid("tool_call_id", _MISSING)
        return self

    def as_variables(self) -> dict[str, Any]:
        """Returns the message as a chat template sees it: parts joined by line feeds and what suits its role, as in vLLM."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        variables: dict[str, Any] = {"role": str(self.role), "content": text}
        if self.name is not None:
            variables["name"] = self.name
        if self.role == "tool":
            variables["tool_call_id"] = self.tool_call_id
        if self.role != "assistant":
            return variables
        if self.tool_calls:
            variables["tool_calls"] = [call.as_variables() for call in self.tool_calls]
        if (reasoning := self.reasoning or self.reasoning_content) is not None:
            variables["reasoning"] = variables["reasoning_content"] = reasoning
        return variables
