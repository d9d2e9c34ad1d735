"""The bodies and answers of ``/tokenize`` and ``/detokenize``, in vLLM's forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from aotgaudi.server.preprocess.body import Body, neutral_only
from aotgaudi.server.preprocess.messages import Message
from aotgaudi.server.preprocess.protocol import (
    MAX_MESSAGES,
    MAX_TEMPLATE_VARIABLES,
    ChatCompletionRequest,
    TokenId,
)
from aotgaudi.server.preprocess.tools import Tools

_OF_CHAT = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(Body):
    """The body of ``POST /tokenize``: a `prompt` as of a completion, or `messages` as of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    tools: Tools | None = None

    chat_template: Annotated[
        object, neutral_only(why="templates are programs; give one to `serve --chat-template`")
    ] = None

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                "invalid_value", "Give either '{name}' or 'messages'", {"name": "prompt"}
            )
        return self

    def chat(self) -> ChatCompletionRequest:
        """Returns the chat whose prompt is to be tokenized. Needs `messages`."""
        given = {name: getattr(self, name) for name in _OF_CHAT}
        return ChatCompletionRequest.model_validate({k: v for k, v in given.items() if v is not None})


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """Tokens of a text, or the text of tokens. `strings` has the tokens as the vocabulary writes them, if asked for.

    `ignored` is as in `PreparedRequest`.
    """

    token_ids: Sequence[int] = ()
    strings: tuple[str, ...] | None = None
    text: str = ""
    ignored: tuple[str, ...] = ()

    def as_tokens(self, max_model_len: int) -> Mapping[str, object]:
        """Returns the answer of ``/tokenize``."""
        return {
            "count": len(self.token_ids),
            "max_model_len": max_model_len,
            "tokens": list(self.token_ids),
            "token_strs": None if self.strings is None else list(self.strings),
        }

    def as_text(self) -> Mapping[str, object]:
        """Returns the answer of ``/detokenize``."""
        return {"prompt": self.text}
