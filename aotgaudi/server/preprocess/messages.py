"""Messages of a chat, as clients send them and as a chat template sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from aotgaudi.server.preprocess.body import (
    MAX_ECHO_CHARS,
    NOT_SUPPORTED,
    Body,
    NoList,
    NoValue,
    shape_of_text,
)

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
    """One message. The unsupported fields are those of answers that clients send back unchanged."""

    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent
    name: str | None = None

    refusal: NoValue = None
    audio: NoValue = None
    function_call: NoValue = None
    tool_calls: NoList = None
    annotations: NoList = None

    def as_variables(self) -> dict[str, str]:
        """Returns what a chat template sees: parts are joined by a line feed, as vLLM joins them."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        variables = {"role": str(self.role), "content": text}
        return variables if self.name is None else {**variables, "name": self.name}
