"""Messages of a chat, as clients send them and as a chat template sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from aotgaudi.server.preprocess.body import (
    MAX_ECHO_CHARS,
    NOT_SUPPORTED,
    Body,
    Ignored,
    NoValue,
    shape_of_text,
)
from aotgaudi.server.preprocess.tools import CallId, Calls

MAX_TEXT_PARTS = 1024  # of one message


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
        raise PydanticCustomError(
            "unsupported_parameter",
            "A content part of type '{kind}' {problem} (supported: text)",
            {"name": "type", "kind": kind[:MAX_ECHO_CHARS], "problem": problem},
        )


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
            raise _missing("content")
        if self.role == "tool" and self.tool_call_id is None:
            raise _missing("tool_call_id")
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


def _missing(name: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "Missing required parameter: '{name}'", {"name": name})
