"""Writes answers in the form of OpenAI's API: whole, or as a stream of server-sent events.

A stream has one event per token, as in vLLM, in as few writes as possible. Some text is held back (half a character, the
beginning of a stop string) and comes with a later token. The event of the token itself is then sent without text, so that
clients can measure the time between tokens by the events.
"""

from __future__ import annotations

import logging
import secrets
import string
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring
from typing import TypeAlias

from aotgaudi.engine.output import ScoredPrompt, TokenEvent
from aotgaudi.engine.steps import TokenLogprobs
from aotgaudi.errors import RequestError
from aotgaudi.server.generation import Generation, TokenCounts
from aotgaudi.server.http import DONE, body_of, escape_line_ends, sse
from aotgaudi.server.preprocess.protocol import StreamUsage
from aotgaudi.server.reply.plan import ReplyPlan, ReplyReader
from aotgaudi.server.reply.text import CallArguments, CallStart, Content, Part, Reasoning

logger = logging.getLogger(__name__)

Json = Mapping[str, object]
LEAST_LOGPROB = -9999.0
_MISTRAL_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that every chunk of one answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def usage(counts: TokenCounts) -> Json:
    """Returns OpenAI's usage object."""
    whole = {
        "prompt_tokens": counts.num_prompt_tokens,
        "completion_tokens": counts.num_output_tokens,
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.num_cached_tokens},
    }
    if counts.num_thought_tokens is None:
        return whole
    return {**whole, "completion_tokens_details": {"reasoning_tokens": counts.num_thought_tokens}}


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
    """Writes the log-probabilities of tokens. `text_of` returns the text of a single token id."""

    text_of: Callable[[int], str]

    def chosen(self, event: TokenEvent) -> list[tuple[str, TokenLogprobs]]:
        """Returns the text and the log-probabilities of each generated token."""
        return [(self.text_of(i), values) for i, values in zip(event.token_ids, event.logprobs, strict=True)]

    def of_prompt(self, prompt: ScoredPrompt) -> list[tuple[str, TokenLogprobs | None]]:
        """Returns the text and the log-probabilities of each token of a prompt; None for the first token."""
        values = (None, *prompt.logprobs)
        return [(self.text_of(i), value) for i, value in zip(prompt.token_ids, values, strict=True)]

    def as_vllm(self, prompt: ScoredPrompt) -> list[Json | None]:
        """Returns vLLM's ``prompt_logprobs``: for each token a map by token id, which begins with the prompt's token."""
        places: list[Json | None] = [None]
        for token_id, values in zip(prompt.token_ids[1:], prompt.logprobs, strict=True):
            ranked = [(token_id, values.logprob, values.rank)]
            ranked += [(i, value, rank) for rank, (i, value) in enumerate(values.top, 1) if i != token_id]
            places.append({str(i): self._ranked(i, value, rank) for i, value, rank in ranked})
        return places

    def _ranked(self, token_id: int, logprob: float, rank: int | None) -> Json:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text_of(token_id)}

    def likeliest(self, values: TokenLogprobs) -> list[tuple[str, float]]:
        """Returns the texts of the likeliest tokens with their log-probabilities."""
        return [(self.text_of(i), value) for i, value in values.top]


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """Writes the ``text_completion`` objects of one answer. `texts` is None without log-probabilities.

    `echoes` has the text that each choice begins with, or is empty. With `prompt_texts`, choices have ``prompt_logprobs``.
    """

    head: AnswerHead
    texts: TokenTexts | None = None
    echoes: Sequence[str] = ()
    prompt_texts: TokenTexts | None = None
    _num_chars: Counter[int] = field(default_factory=Counter, init=False)
    """The number of characters written so far, by choice; the next token begins there."""
    _echoed: set[int] = field(default_factory=set, init=False)

    def opening(self, index: int) -> Sequence[Json]:
        """Returns nothing: the echo comes with the first token."""
        del index
        return ()

    @property
    def is_plain(self) -> bool:
        """Whether chunks that carry only text are otherwise equal."""
        return not self.echoes

    def chunks(self, index: int, event: TokenEvent) -> Sequence[Json]:
        """Returns a ``text_completion`` with the new text."""
        has_echo = index not in self._echoed
        self._echoed.add(index)
        return (_envelope(self.head, "text_completion", [self._choice(index, event, has_echo)]),)

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """Returns a ``text_completion`` without choices."""
        return _envelope(self.head, "text_completion", [], counts)

    def whole(self, outputs: Sequence[Sequence[TokenEvent]], counts: TokenCounts) -> Json:
        """Returns a ``text_completion`` with every choice."""
        joined = map(TokenEvent.joined, outputs)
        choices = [self._choice(index, output, has_echo=True) for index, output in enumerate(joined)]
        return _envelope(self.head, "text_completion", choices, counts)

    def _choice(self, index: int, event: TokenEvent, has_echo: bool) -> Json:
        choice = {
            "index": index,
            "text": (self.echoes[index] if has_echo and self.echoes else "") + event.text,
            "logprobs": None if self.texts is None else self._logprobs(index, event, self.texts),
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        if self.prompt_texts is not None and event.prompt is not None:
            choice["prompt_logprobs"] = self.prompt_texts.as_vllm(event.prompt)
        return choice

    def _logprobs(self, index: int, event: TokenEvent, texts: TokenTexts) -> Json:
        """Returns the four parallel lists of a completion. Each map of likeliest tokens includes the chosen one."""
        tokens: list[tuple[str, TokenLogprobs | None]] = [*texts.chosen(event)]
        if self.echoes and event.prompt is not None:
            tokens = [*texts.of_prompt(event.prompt), *tokens]
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [values and _finite(values.logprob) for _, values in tokens],
            "top_logprobs": [values and _by_text(text, values, texts) for text, values in tokens],
            "text_offset": [self._offset(index, text) for text, _ in tokens],
        }

    def _offset(self, index: int, text: str) -> int:
        """Returns where a token's text begins in the choice's text."""
        offset = self._num_chars[index]
        self._num_chars[index] += len(text)
        return offset


def _by_text(chosen: str, values: TokenLogprobs, texts: TokenTexts) -> Json:
    """Returns a map by text, with the chosen token first. Of tokens with equal text, it holds only the likeliest."""
    found = {chosen: _finite(values.logprob)}
    for text, value in texts.likeliest(values):
        found[text] = max(found.get(text, LEAST_LOGPROB), _finite(value))
    return found


class PlainMessage:
    """Writes the message of one choice, which is all content."""

    num_thought_tokens = None

    def deltas(self, event: TokenEvent) -> Sequence[Json]:
        """Returns the new text, which may be empty."""
        return ({"content": event.text},)

    def whole(self, events: Sequence[TokenEvent]) -> Json:
        """Returns the message of all its `events`."""
        text = "".join(event.text for event in events)
        return {"role": "assistant", "content": text, "refusal": None, "annotations": [], "reasoning": None}

    def finish_reason(self, event: TokenEvent) -> str | None:
        """Returns the engine's reason."""
        return event.finish_reason


def _new_call_id(plan: ReplyPlan) -> str:
    """Returns an id for a call. Mistral's chat templates accept only ids of nine letters and digits."""
    if plan.calls == "mistral":
        return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class ReadMessage:
    """Writes the message of one choice (content, calls and reasoning), which is read by a plan."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan, self._reader, self._num_calls = plan, ReplyReader(plan), 0

    @property
    def num_thought_tokens(self) -> int | None:
        """How many tokens of the reply so far are reasoning; None if the model does not think."""
        return self._reader.num_thought_tokens if self._plan.has_reasoning else None

    def deltas(self, event: TokenEvent) -> Sequence[Json]:
        """Returns what the event adds, as one object or several. A call's name and arguments are in different objects."""
        deltas: list[dict[str, str]] = [{}]
        calls: list[list[dict[str, object]]] = [[]]
        for part in self._parts(event):
            if isinstance(part, CallArguments) and calls[-1]:
                deltas.append({})
                calls.append([])
            if isinstance(part, (CallStart, CallArguments)):
                calls[-1].append(self._call(part))
            else:
                for name in ("content",) if isinstance(part, Content) else ("reasoning", "reasoning_content"):
                    deltas[-1][name] = deltas[-1].get(name, "") + part.text
        return [
            {**delta, "tool_calls": made} if made else delta
            for delta, made in zip(deltas, calls, strict=True)
        ]

    def whole(self, events: Sequence[TokenEvent]) -> Json:
        """Returns the message of all its `events`. Reasoning is under both of the names that vLLM has used for it."""
        texts: dict[type[Part], str] = {Content: "", Reasoning: ""}
        calls: list[tuple[str, str]] = []
        for part in (part for event in events for part in self._parts(event)):
            if isinstance(part, CallStart):
                calls.append((part.name, ""))
            elif isinstance(part, CallArguments):
                name, arguments = calls[-1]
                calls[-1] = name, arguments + part.text
            else:
                texts[type(part)] += part.text
        content, reasoning = texts[Content], texts[Reasoning]
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if not content and (calls or reasoning) else content,
            "refusal": None,
            "annotations": [],
            "reasoning": reasoning or None,
        }
        if self._plan.has_reasoning:
            message["reasoning_content"] = message["reasoning"]
        if calls:
            message["tool_calls"] = [
                {
                    "id": _new_call_id(self._plan),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in calls
            ]
        return message

    def finish_reason(self, event: TokenEvent) -> str | None:
        """Returns why the reply has ended. As in OpenAI's API, a call of a prescribed function ends with "stop"."""
        if event.finish_reason == "stop" and self._reader.has_called and self._plan.calls != "one":
            return "tool_calls"
        return event.finish_reason

    def _parts(self, event: TokenEvent) -> Iterable[Part]:
        is_last = event.finish_reason is not None
        return self._reader.parts(event.text, is_last=is_last, num_tokens=len(event.token_ids))

    def _call(self, part: CallStart | CallArguments) -> dict[str, object]:
        if isinstance(part, CallArguments):
            return {"index": self._num_calls - 1, "function": {"arguments": part.text}}
        self._num_calls += 1
        return {
            "index": self._num_calls - 1,
            "id": _new_call_id(self._plan),
            "type": "function",
            "function": {"name": part.name, "arguments": ""},
        }


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects. `texts` as in `CompletionFormat`.

    Each message begins with `echo`. Its text is read by `plan`; without one, all of it is content. With `prompt_texts`, the
    whole answer has ``prompt_logprobs``.
    """

    head: AnswerHead
    texts: TokenTexts | None = None
    echo: str = ""
    plan: ReplyPlan | None = None
    prompt_texts: TokenTexts | None = None
    _messages: dict[int, PlainMessage | ReadMessage] = field(default_factory=dict, init=False)

    @property
    def is_plain(self) -> bool:
        """Whether chunks that carry only text are otherwise equal."""
        return self.plan is None

    def opening(self, index: int) -> Sequence[Json]:
        """Returns the chunk that states the message's role, and one with the echo, if there is one."""
        deltas = [{"role": "assistant", "content": ""}, {"content": self.echo}]
        return [self._chunk(index, delta) for delta in deltas[: 2 if self.echo else 1]]

    def chunks(self, index: int, event: TokenEvent) -> Sequence[Json]:
        """Returns a ``chat.completion.chunk`` for each delta. The name of a call has its own chunk, before its arguments."""
        message = self._message(index)
        *first, last = message.deltas(event)
        reason = message.finish_reason(event)
        return (
            *(self._chunk(index, delta) for delta in first),
            self._chunk(index, last, self._logprobs(event), reason, event.stop_reason),
        )

    def usage_chunk(self, counts: TokenCounts) -> Json:
        """Returns a ``chat.completion.chunk`` without choices."""
        return _envelope(self.head, "chat.completion.chunk", [], self._with_thoughts(counts))

    def whole(self, outputs: Sequence[Sequence[TokenEvent]], counts: TokenCounts) -> Json:
        """Returns a ``chat.completion`` with every choice."""
        choices = [self._choice(index, events) for index, events in enumerate(outputs)]
        answer = _envelope(self.head, "chat.completion", choices, self._with_thoughts(counts))
        prompt = outputs[0][0].prompt
        if self.prompt_texts is None or prompt is None:
            return answer
        return {**answer, "prompt_logprobs": self.prompt_texts.as_vllm(prompt)}

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return _envelope(self.head, "chat.completion.chunk", [choice])

    def _with_thoughts(self, counts: TokenCounts) -> TokenCounts:
        thoughts = [num for each in self._messages.values() if (num := each.num_thought_tokens) is not None]
        return replace(counts, num_thought_tokens=sum(thoughts)) if thoughts else counts

    def _choice(self, index: int, events: Sequence[TokenEvent]) -> Json:
        message, output = self._message(index), TokenEvent.joined(events)
        whole = message.whole(events)
        return {
            "index": index,
            "message": {**whole, "content": self.echo + str(whole["content"] or "")} if self.echo else whole,
            "logprobs": self._logprobs(output),
            "finish_reason": message.finish_reason(output),
            "stop_reason": output.stop_reason,
        }

    def _message(self, index: int) -> PlainMessage | ReadMessage:
        if index not in self._messages:
            self._messages[index] = PlainMessage() if self.plan is None else ReadMessage(self.plan)
        return self._messages[index]

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
    """Returns a very low number for an impossible token, as vLLM and OpenAI's API do, because JSON has no infinity."""
    return max(logprob, LEAST_LOGPROB)


AnswerFormat: TypeAlias = "CompletionFormat | ChatFormat"
"""Writes events as JSON, as an endpoint requires. `index` is the choice to which an event belongs."""

_PLACE = "\x00text\x00"
"""Marks where a chunk's text goes. No model name contains it."""
_MOST_BYTES = 65536
"""The approximate limit of one write, so that slow readers do not fill the server's memory."""
_WRITTEN_PLACE = encode_basestring(_PLACE).encode()


class ChunkWriter:
    """Writes one answer as server-sent events.

    Most chunks differ only in their text, so the JSON around the text is encoded once.
    """

    def __init__(
        self, answer_format: AnswerFormat, prompt_lens: Sequence[int] = (), usage_in: StreamUsage = "none"
    ) -> None:
        """`prompt_lens` has the length of each choice's prompt."""
        self._format, self._prompt_lens, self._usage_in = answer_format, prompt_lens, usage_in
        self._num_output_tokens: Counter[int] = Counter()
        self._is_plain = answer_format.is_plain and usage_in != "every"
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._is_open = False

    def closing(self, counts: TokenCounts) -> bytes:
        """Returns the usage, if the client wants it, and the end marker."""
        return (b"" if self._usage_in == "none" else sse(self._format.usage_chunk(counts))) + DONE

    def failure(self, error: Exception) -> bytes:
        """Returns the error and the end marker."""
        return sse(body_of(error)) + DONE

    def chunk(self, index: int, event: TokenEvent) -> bytes:
        """Returns the server-sent event for `event` of the choice `index`, or several if one cannot hold it.

        The first time, the chunks that open the choices precede it, as with vLLM.
        """
        if not self._is_open:
            self._is_open = True
            openings = [self._written(i, self._format.opening(i)) for i in range(len(self._prompt_lens))]
            return b"".join([*openings, self.chunk(index, event)])
        if self._usage_in == "every":
            self._num_output_tokens[index] += len(event.token_ids)
        if not self._is_plain or event.logprobs or event.finish_reason is not None or not event.text:
            return self._written(index, self._format.chunks(index, event))
        before, after = self._frames.get(index) or self._frame(index)
        return before + escape_line_ends(encode_basestring(event.text)).encode() + after

    def _written(self, index: int, chunks: Sequence[Json]) -> bytes:
        """Returns `chunks` as events, with the choice's usage so far if every chunk has it."""
        if self._usage_in == "every":
            counts = TokenCounts(self._prompt_lens[index], self._num_output_tokens[index])
            chunks = [{**chunk, "usage": usage(counts)} for chunk in chunks]
        return b"".join(map(sse, chunks))

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        sample = TokenEvent(request_id="", text=_PLACE, token_ids=())
        (chunk,) = self._format.chunks(index, sample)
        before, _, after = sse(chunk).rpartition(_WRITTEN_PLACE)
        self._frames[index] = before, after
        return before, after


async def stream(generation: Generation, writer: ChunkWriter) -> AsyncIterator[bytes]:
    """Yields server-sent events until all choices have ended. Joins events that are available at the same time."""
    ready = bytearray()
    try:
        async for index, event in generation.events():
            ready += writer.chunk(index, event)
            if ready and (generation.must_wait or len(ready) >= _MOST_BYTES):
                yield bytes(ready)
                ready.clear()
        ready += writer.closing(generation.token_counts)
    except Exception as error:  # The status is already sent, so the stream must report it.
        log_unexpected(error)
        ready += writer.failure(error)
    yield bytes(ready)


def log_unexpected(error: Exception) -> None:
    """Logs `error` with its traceback, unless it is expected."""
    if not isinstance(error, RequestError):
        logger.error("a request failed", exc_info=error)
