"""Writes the message of one choice of a chat (content, calls and reasoning) in the form of OpenAI's API and vLLM."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aotgaudi.engine.output import TokenEvent
from aotgaudi.server.reply.plan import ReplyPlan, ReplyReader
from aotgaudi.server.reply.text import CallArguments, CallStart, Content, Part, Reasoning

Json = Mapping[str, object]

_MISTRAL_ID_CHARS = string.ascii_letters + string.digits


def _new_call_id(plan: ReplyPlan) -> str:
    """Returns an id for a call. Mistral's chat templates accept only ids of nine letters and digits."""
    if plan.calls == "mistral":
        return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Reply:
    """A whole reply: content, reasoning, and the name and arguments of each call."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Reply:
        """Returns the reply that consists of these parts."""
        reply = cls()
        for part in parts:
            if isinstance(part, Content):
                reply.content += part.text
            elif isinstance(part, Reasoning):
                reply.reasoning += part.text
            elif isinstance(part, CallStart):
                reply.calls.append((part.name, ""))
            else:
                name, arguments = reply.calls[-1]
                reply.calls[-1] = name, arguments + part.text
        return reply


class ReadMessage:
    """Writes the message of a reply that is read by a plan."""

    def __init__(self, plan: ReplyPlan, new_id: Callable[[ReplyPlan], str] = _new_call_id) -> None:
        self._plan, self._new_id = plan, new_id
        self._reader, self._num_calls = ReplyReader(plan), 0

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
        reply = Reply.of(part for event in events for part in self._parts(event))
        is_silent = not reply.content and (reply.calls or reply.reasoning)
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if is_silent else reply.content,
            "refusal": None,
            "annotations": [],
            "reasoning": reply.reasoning or None,
        }
        if self._plan.has_reasoning:
            message["reasoning_content"] = message["reasoning"]
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": self._new_id(self._plan),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in reply.calls
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
            "id": self._new_id(self._plan),
            "type": "function",
            "function": {"name": part.name, "arguments": ""},
        }
