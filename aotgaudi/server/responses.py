"""The bodies of answers, as OpenAI's API has them, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from aotgaudi.server.generation import Piece, TokenCounts

Json = Mapping[str, object]


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
    return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    head: AnswerHead

    def opening(self, index: int) -> Json | None:
        """The chunk that says who speaks."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def chunk(self, piece: Piece) -> Json:
        """A ``chat.completion.chunk`` with the new text."""
        return self._chunk(piece.index, {"content": piece.text} if piece.text else {}, piece.finish_reason)

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """A ``chat.completion.chunk`` without choices."""
        return _envelope(self.head, "chat.completion.chunk", [], counts)

    def whole(self, outputs: Sequence[Piece], counts: TokenCounts) -> Json:
        """A ``chat.completion`` with every choice."""
        return _envelope(self.head, "chat.completion", list(map(_chat_choice, outputs)), counts)

    def _chunk(self, index: int, delta: Json, finish_reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _envelope(self.head, "chat.completion.chunk", [choice])


def _chat_choice(piece: Piece) -> Json:
    message = {"role": "assistant", "content": piece.text, "refusal": None}
    return {
        "index": piece.index,
        "message": message,
        "logprobs": None,
        "finish_reason": piece.finish_reason,
    }
