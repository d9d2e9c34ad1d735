"""The bodies of answers, as OpenAI's API has them, whole and in chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aotgaudi.engine.output import TokenEvent
from aotgaudi.engine.steps import TokenLogprobs
from aotgaudi.server.generation import TokenCounts

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
    """How an endpoint writes events as JSON. `index` is the choice that an event belongs to."""

    @property
    def head(self) -> AnswerHead:
        """What every chunk repeats."""
        ...

    def opening(self, index: int) -> Json | None:
        """Returns the chunk that opens a choice's stream, if the format has one."""
        ...

    def chunk(self, index: int, event: TokenEvent) -> Json:
        """Returns the chunk that carries `event`."""
        ...

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """Returns the last chunk of a stream that was asked for its usage: it has no choices."""
        ...

    def whole(self, outputs: Sequence[TokenEvent], counts: TokenCounts) -> Json:
        """Returns the whole answer; `outputs` are complete, in the order of their choices."""
        ...


def usage(counts: TokenCounts) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counts.num_prompt_tokens,
        "completion_tokens": counts.num_output_tokens,
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.num_cached_tokens},
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
class TokenTexts:
    """Writes the log-probabilities of tokens. `text_of` gives the text of one token id alone."""

    text_of: Callable[[int], str]

    def chosen(self, event: TokenEvent) -> list[tuple[str, TokenLogprobs]]:
        """Returns the text and the log-probabilities of each token that was generated."""
        return [(self.text_of(i), values) for i, values in zip(event.token_ids, event.logprobs, strict=True)]

    def likeliest(self, values: TokenLogprobs) -> list[tuple[str, float]]:
        """Returns the texts of the likeliest tokens with their log-probabilities."""
        return [(self.text_of(i), value) for i, value in values.top]


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """Writes ``text_completion`` objects, of one answer. `texts` is None where no log-probabilities were asked for."""

    head: AnswerHead
    texts: TokenTexts | None = None
    _num_chars: Counter[int] = field(default_factory=Counter, init=False)
    """Characters of the tokens written so far, by choice: where the next one begins."""

    def opening(self, index: int) -> Json | None:
        """Returns None: a completion's stream starts with its text."""
        del index
        return None

    def chunk(self, index: int, event: TokenEvent) -> Json:
        """Returns a ``text_completion`` with the new text."""
        return _envelope(self.head, "text_completion", [self._choice(index, event)])

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """Returns a ``text_completion`` without choices."""
        return _envelope(self.head, "text_completion", [], counts)

    def whole(self, outputs: Sequence[TokenEvent], counts: TokenCounts) -> Json:
        """Returns a ``text_completion`` with every choice."""
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return _envelope(self.head, "text_completion", choices, counts)

    def _choice(self, index: int, event: TokenEvent) -> Json:
        return {
            "index": index,
            "text": event.text,
            "logprobs": None if self.texts is None else self._logprobs(index, event, self.texts),
            "finish_reason": event.finish_reason,
        }

    def _logprobs(self, index: int, event: TokenEvent, texts: TokenTexts) -> Json:
        """The four parallel lists of a completion. The likeliest tokens are a map, which has the chosen one, too."""
        chosen = texts.chosen(event)
        return {
            "tokens": [text for text, _ in chosen],
            "token_logprobs": [_finite(values.logprob) for _, values in chosen],
            "top_logprobs": [_by_text(text, values, texts) for text, values in chosen],
            "text_offset": [self._offset(index, text) for text, _ in chosen],
        }

    def _offset(self, index: int, text: str) -> int:
        """Where a token's text begins in the choice's text, as the texts of the tokens add up."""
        offset = self._num_chars[index]
        self._num_chars[index] += len(text)
        return offset


def _by_text(chosen: str, values: TokenLogprobs, texts: TokenTexts) -> Json:
    """The chosen token first. Of several tokens with the same text, which a map cannot hold, the likeliest."""
    found = {chosen: _finite(values.logprob)}
    for text, value in texts.likeliest(values):
        found.setdefault(text, _finite(value))
    return found


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects. `texts` as in `CompletionFormat`."""

    head: AnswerHead
    texts: TokenTexts | None = None

    def opening(self, index: int) -> Json | None:
        """Returns the chunk that says who speaks."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, event: TokenEvent) -> Json:
        """Returns a ``chat.completion.chunk`` with the new text."""
        delta = {"content": event.text} if event.text else {}
        return self._chunk(index, delta, self._logprobs(event), event.finish_reason)

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """Returns a ``chat.completion.chunk`` without choices."""
        return _envelope(self.head, "chat.completion.chunk", [], counts)

    def whole(self, outputs: Sequence[TokenEvent], counts: TokenCounts) -> Json:
        """Returns a ``chat.completion`` with every choice."""
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return _envelope(self.head, "chat.completion", choices, counts)

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _envelope(self.head, "chat.completion.chunk", [choice])

    def _choice(self, index: int, output: TokenEvent) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, event: TokenEvent) -> Json | None:
        if self.texts is None:
            return None
        content = [
            {
                **_chat_token(text, values.logprob),
                "top_logprobs": [_chat_token(*token) for token in self.texts.likeliest(values)],
            }
            for text, values in self.texts.chosen(event)
        ]
        return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    """JSON has no infinity: an impossible token gets a very low number, as in vLLM and OpenAI's API."""
    return max(logprob, LEAST_LOGPROB)
