"""Events: what the engine tells the owner of a request. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

from aotgaudi.engine.request import FinishReason
from aotgaudi.engine.steps import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, counted at its end."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New output. `text` may be empty while `token_ids` is not: text is held back until it is certain.

    `logprobs` are those of the token, where the request asked for them. `finish_reason` and `usage` are set on
    the last event only.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent:
    """The last event of a request whose step failed."""

    request_id: str
    error: Exception


Event = Union[TokenEvent, ErrorEvent]
OnEvent = Callable[[Event], None]
"""Called on the engine's thread: it must return soon, and hand over to other threads by itself."""
