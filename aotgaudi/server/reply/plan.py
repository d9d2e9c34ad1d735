"""The plan by which one reply is read, and the reader.

The request worker makes the plan, because it knows the request's tools and prompt. The server, which gets the reply's text,
follows it.

Reasoning stands between ``<think>`` and ``</think>``. Some chat templates write ``<think>`` at the end of the prompt, or a
whole empty thought if the client wants no reasoning. Then the prompt says how the reply begins. Otherwise, DeepSeek's R1
thinks at once, with or without writing ``<think>``, and Qwen 3 thinks if it writes ``<think>``. The parsers have the names
of vLLM's ``--reasoning-parser``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from aotgaudi.server.options import ReasoningParser
from aotgaudi.server.reply.text import CallArguments, CallStart, Content, Parsing, Part, Reasoning, Text
from aotgaudi.server.reply.tool_calls import Calls, pass_rest, read_calls

Thinks = Literal["no", "at once", "if it says so"]
"""Whether a reply begins with reasoning."""

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """How one reply is read.

    Attributes:
        calls: How calls of tools are written; None if the reply has none.
        function: The function that a reply of the kind "one" calls.
        has_parallel_calls: Whether calls after the first one are passed on.
        thinks: Whether the reply begins with reasoning.
        has_reasoning: Whether the model thinks in some replies, so that clients expect the fields for reasoning in all.
        shows_reasoning: Whether the client wants to see reasoning.
    """

    calls: Calls | None = None
    function: str = ""
    has_parallel_calls: bool = True
    thinks: Thinks = "no"
    has_reasoning: bool = False
    shows_reasoning: bool = True

    @property
    def has_special_markers(self) -> bool:
        """Whether special tokens may mark calls. Text usually leaves these tokens out."""
        return self.calls in ("hermes", "mistral")


class ReplyReader:
    """Reads one reply as it comes.

    `is_thinking` says whether the newest text is reasoning. `num_thought_tokens` counts the tokens of reasoning so far.
    """

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan, self._text, self._num_calls = plan, Text(), 0
        self._parsing = self._parse()
        self.is_thinking = plan.thinks == "at once"
        self.num_thought_tokens = 0

    @property
    def has_called(self) -> bool:
        """Whether the reply calls a tool."""
        return self._num_calls > 0

    def parts(self, text: str, *, is_last: bool, num_tokens: int = 0) -> list[Part]:
        """Takes the next piece of `num_tokens`, and returns the parts that are certain now (all if `is_last`)."""
        self.num_thought_tokens += num_tokens if self.is_thinking else 0
        self._text.rest += text
        self._text.has_ended = is_last
        found: list[Part] = []
        for part in self._read():
            _append(found, part)
        return found

    def _parse(self) -> Parsing[None]:
        yield from read_reasoning(self._text, self._plan.thinks)
        self.is_thinking = False
        if self._plan.calls is None:
            yield from pass_rest(self._text, Content)
        else:
            yield from read_calls(self._text, self._plan.calls, self._plan.function)

    def _read(self) -> Iterator[Part]:
        for part in self._parsing:
            if part is None:
                return
            if isinstance(part, Reasoning):
                self.is_thinking = True
            if isinstance(part, CallStart):
                self._num_calls += 1
            elif not part.text or (isinstance(part, Reasoning) and not self._plan.shows_reasoning):
                continue
            is_call = isinstance(part, (CallStart, CallArguments))
            if not is_call or self._num_calls == 1 or self._plan.has_parallel_calls:
                yield part


def _append(parts: list[Part], part: Part) -> None:
    """Appends `part`, or adds its text to the last part if that is of the same kind."""
    last = parts[-1] if parts else None
    if isinstance(part, CallStart) or type(last) is not type(part):
        parts.append(part)
    else:
        assert isinstance(last, (Content, Reasoning, CallArguments))
        parts[-1] = type(last)(last.text + part.text)


def thinks_after(prompt: str, parser: ReasoningParser) -> Thinks:
    """Returns whether the reply to `prompt`, the rendered chat template, begins with reasoning."""
    end = prompt.rstrip()
    if end.endswith(_OPEN):
        return "at once"
    if end.endswith(_CLOSE):
        return "no"
    return "at once" if parser == "deepseek_r1" else "if it says so"


def read_reasoning(text: Text, thinks: Thinks) -> Parsing[None]:
    """Reads the reasoning before the answer, and the white space around it. Reasoning that is cut off counts too."""
    if thinks == "no":
        return
    marker = yield from text.take_marker(_OPEN)
    if thinks == "if it says so" and not marker:
        return
    yield from text.take_space()
    if (yield from text.pass_on_until(_CLOSE, Reasoning)):
        yield from text.take_space()
