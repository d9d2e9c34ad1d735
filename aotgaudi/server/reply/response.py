"""Writes the answer of ``/v1/responses``: an object with a list of items, whole or as the events that build it up.

An item is a message, reasoning or a call. The next item begins only when the last one has ended::

    response.created, response.in_progress
    response.output_item.added
      response.content_part.added, response.output_text.delta ..., response.output_text.done, response.content_part.done
      or response.function_call_arguments.delta ..., response.function_call_arguments.done
    response.output_item.done
    response.completed, or response.incomplete, or response.failed

A whole response is built in the same way, and its events are dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aotgaudi.engine.output import TokenEvent
from aotgaudi.errors import RequestError
from aotgaudi.server.generation import TokenCounts
from aotgaudi.server.http import INTERNAL_ERROR_MESSAGE, named_sse
from aotgaudi.server.reply.message import Json, new_call_id
from aotgaudi.server.reply.plan import ReplyPlan, ReplyReader
from aotgaudi.server.reply.text import CallArguments, CallStart, Content, Part, Reasoning
from aotgaudi.server.responses import AnswerHead

Event = dict[str, Any]


@dataclass(slots=True)
class _Item:
    """An item under construction. `delta` and `done` are the types of its text's events."""

    value: dict[str, Any]
    delta: str
    done: str
    part: dict[str, Any] | None = None
    text: str = ""

    @classmethod
    def of(cls, part: Part, plan: ReplyPlan) -> _Item:
        """Returns an empty item of the kind of `part`."""
        value: Event
        text: Event
        if isinstance(part, CallStart):
            value = {
                "type": "function_call",
                "id": _new_id("fc"),
                "call_id": new_call_id(plan),
                "name": part.name,
                "arguments": "",
                "status": "in_progress",
            }
            return cls(
                value, "response.function_call_arguments.delta", "response.function_call_arguments.done"
            )
        if isinstance(part, Reasoning):
            value = {
                "type": "reasoning",
                "id": _new_id("rs"),
                "summary": [],
                "content": [],
                "status": "in_progress",
            }
            text = {"type": "reasoning_text", "text": ""}
            return cls(value, "response.reasoning_text.delta", "response.reasoning_text.done", text)
        value = {
            "type": "message",
            "id": _new_id("msg"),
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return cls(value, "response.output_text.delta", "response.output_text.done", text)

    def holds(self, part: Part) -> bool:
        """Returns whether `part` continues this item."""
        kinds = {"function_call": CallArguments, "reasoning": Reasoning, "message": Content}
        return isinstance(part, kinds[self.value["type"]])


@dataclass
class ResponseWriter:
    """Writes one response. `repeats` is what it repeats from its request. `clock` returns Unix time in seconds."""

    head: AnswerHead
    repeats: Mapping[str, Any]
    plan: ReplyPlan
    clock: Callable[[], int]
    _output: list[dict[str, Any]] = field(default_factory=list, init=False)
    _item: _Item | None = field(default=None, init=False)
    _num_events: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._reader = ReplyReader(self.plan)
        self._reason: str | None = None

    def whole(self, events: Iterable[TokenEvent], counts: TokenCounts) -> Json:
        """Returns the whole response from all its events, in order."""
        for event in events:
            for _ in self._grown(event):
                pass
        return self._ended(counts)

    def opening(self) -> bytes:
        """Returns the events that come before the first token."""
        response = self._response("in_progress")
        return self._written(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def chunk(self, index: int, event: TokenEvent) -> bytes:
        """Returns the events that `event` brings about."""
        del index
        return self._written(self._grown(event))

    def closing(self, counts: TokenCounts) -> bytes:
        """Returns the last event."""
        response = self._ended(counts)
        return self._written([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: Exception) -> bytes:
        """Returns the last event of a response that failed. It reveals nothing internal."""
        message = str(error) if isinstance(error, RequestError) else INTERNAL_ERROR_MESSAGE
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": message}}
        return self._written([{"type": "response.failed", "response": failed}])

    def _written(self, events: Sequence[Event] | Iterator[Event]) -> bytes:
        written = bytearray()
        for event in events:
            written += named_sse(event["type"], {**event, "sequence_number": self._num_events})
            self._num_events += 1
        return bytes(written)

    # Items

    def _grown(self, output: TokenEvent) -> Iterator[Event]:
        self._reason = output.finish_reason
        is_last = output.finish_reason is not None
        for part in self._reader.parts(output.text, is_last=is_last, num_tokens=len(output.token_ids)):
            yield from self._add(part)
        if is_last:
            if self._item is None:
                yield from self._begin(Content(""))
            yield from self._end("incomplete" if output.finish_reason == "length" else "completed")

    def _add(self, part: Part) -> Iterator[Event]:
        if self._item is None or not self._item.holds(part):
            yield from self._end("completed")
            yield from self._begin(part)
        if not isinstance(part, CallStart):
            yield from self._grow(part.text)

    def _begin(self, part: Part) -> Iterator[Event]:
        self._item = item = _Item.of(part, self.plan)
        self._output.append(item.value)
        added = {"type": "response.output_item.added", "output_index": len(self._output) - 1}
        yield {**added, "item": dict(item.value)}
        if item.part is not None:
            yield {"type": "response.content_part.added", **self._place(item), "part": dict(item.part)}

    def _grow(self, text: str) -> Iterator[Event]:
        item = self._item
        assert item is not None
        item.text += text
        yield {"type": item.delta, **self._place(item), "delta": text, **_logprobs(item)}

    def _end(self, status: str) -> Iterator[Event]:
        item, self._item = self._item, None
        if item is None:
            return
        place, name = self._place(item), "arguments" if item.part is None else "text"
        yield {"type": item.done, **place, name: item.text, **_logprobs(item)}
        if item.part is None:
            item.value["arguments"] = item.text
        else:
            part = {**item.part, "text": item.text}
            item.value["content"] = [part]
            yield {"type": "response.content_part.done", **place, "part": part}
        item.value["status"] = status
        yield {
            "type": "response.output_item.done",
            "output_index": place["output_index"],
            "item": dict(item.value),
        }

    def _place(self, item: _Item) -> Event:
        place = {"item_id": item.value["id"], "output_index": len(self._output) - 1}
        return place if item.part is None else {**place, "content_index": 0}

    # The response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.head.model,
            "system_fingerprint": self.head.system_fingerprint,
            "output": list(self._output),
            "usage": None,
            **self.repeats,
        }

    def _ended(self, counts: TokenCounts) -> dict[str, Any]:
        is_cut_off = self._reason == "length"
        return {
            **self._response("incomplete" if is_cut_off else "completed"),
            "completed_at": None if is_cut_off else self.clock(),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
            "usage": _usage(counts, self._reader.num_thought_tokens),
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _logprobs(item: _Item) -> Event:
    return {"logprobs": []} if item.value["type"] == "message" else {}


def _usage(counts: TokenCounts, num_thought_tokens: int) -> Json:
    return {
        "input_tokens": counts.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thought_tokens},
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
    }
