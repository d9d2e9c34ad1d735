"""The bodies of answers, as OpenAI's API has them, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from aotgaudi.server.generation import LoggedToken, Piece, TokenCounts

Json = Mapping[str, object]
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of one answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class AnswerFormat(Protocol):
    """How pieces of text become an endpoint's JSON."""

    def opening(self, index: int) -> Json | None:
        """The chunk that opens a choice's stream, where the format has one."""
        ...

    def chunk(self, piece: Piece) -> Json:
        """The chunk that carries `piece`."""
        ...

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """The last chunk of a stream that was asked for its usage: it has no choices."""
        ...

    def whole(self, outputs: Sequence[Piece], counts: TokenCounts) -> Json:
        """The answer in one; `outputs` are complete texts in the order of their index."""
        ...


def usage(counts: TokenCounts) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counts.num_prompt_tokens,
        "completion_tokens": counts.num_output_tokens,
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
    }


def _envelope(
    head: AnswerHead, kind: str, choices: Sequence[Json], counts: TokenCounts | None = None
) -> Json:
    body = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "choices": choices,
    }
    return body if counts is None else {**body, "usage": usage(counts)}


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """``text_completion`` objects."""

    head: AnswerHead

    def opening(self, index: int) -> Json | None:
        """None: a completion's stream starts with its text."""
        del index
        return None

    def chunk(self, piece: Piece) -> Json:
        """A ``text_completion`` with the new text."""
        return _envelope(self.head, "text_completion", [_completion_choice(piece)])

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """A ``text_completion`` without choices."""
        return _envelope(self.head, "text_completion", [], counts)

    def whole(self, outputs: Sequence[Piece], counts: TokenCounts) -> Json:
        """A ``text_completion`` with every choice."""
        return _envelope(self.head, "text_completion", list(map(_completion_choice, outputs)), counts)


def _completion_choice(piece: Piece) -> Json:
    return {
        "index": piece.index,
        "text": piece.text,
        "logprobs": _completion_logprobs(piece),
        "finish_reason": piece.finish_reason,
    }


def _completion_logprobs(piece: Piece) -> Json | None:
    """The four parallel lists of a completion; the likeliest tokens are a map that has the chosen one, too."""
    if piece.tokens is None:
        return None
    return {
        "tokens": [token.text for token in piece.tokens],
        "token_logprobs": [_finite(token.logprob) for token in piece.tokens],
        "top_logprobs": [_by_text(token) for token in piece.tokens],
        "text_offset": [token.offset for token in piece.tokens],
    }


def _by_text(token: LoggedToken) -> Json:
    """The chosen token first; of tokens with one text, which a map cannot hold, the likeliest."""
    found = {token.text: _finite(token.logprob)}
    for text, value in token.top:
        found.setdefault(text, _finite(value))
    return found


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    head: AnswerHead

    def opening(self, index: int) -> Json | None:
        """The chunk that says who speaks."""
        return self._chunk(Piece(index, "", None), {"role": "assistant", "content": ""})

    def chunk(self, piece: Piece) -> Json:
        """A ``chat.completion.chunk`` with the new text."""
        return self._chunk(piece, {"content": piece.text} if piece.text else {})

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """A ``chat.completion.chunk`` without choices."""
        return _envelope(self.head, "chat.completion.chunk", [], counts)

    def whole(self, outputs: Sequence[Piece], counts: TokenCounts) -> Json:
        """A ``chat.completion`` with every choice."""
        return _envelope(self.head, "chat.completion", list(map(_chat_choice, outputs)), counts)

    def _chunk(self, piece: Piece, delta: Json) -> Json:
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": _chat_logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        return _envelope(self.head, "chat.completion.chunk", [choice])


def _chat_choice(piece: Piece) -> Json:
    message = {"role": "assistant", "content": piece.text, "refusal": None}
    return {
        "index": piece.index,
        "message": message,
        "logprobs": _chat_logprobs(piece),
        "finish_reason": piece.finish_reason,
    }


def _chat_logprobs(piece: Piece) -> Json | None:
    if piece.tokens is None:
        return None
    content = [
        {
            **_chat_token(token.text, token.logprob),
            "top_logprobs": [_chat_token(text, value) for text, value in token.top],
        }
        for token in piece.tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    """JSON has no infinity: what cannot be is very unlikely, as in vLLM and OpenAI's API."""
    return max(logprob, LEAST_LOGPROB)
