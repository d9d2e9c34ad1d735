"""Finds a model's reasoning, between ``<think>`` and ``</think>``, for the names of vLLM's ``--reasoning-parser``.

Some chat templates write ``<think>`` at the end of the prompt, or a whole empty thought if the client wants no reasoning.
Then the prompt says how the reply begins. Otherwise, DeepSeek's R1 thinks at once, with or without writing ``<think>``, and
Qwen 3 thinks if it writes ``<think>``.
"""

from __future__ import annotations

from typing import Literal

from aotgaudi.server.options import ReasoningParser
from aotgaudi.server.reply.text import Parsing, Reasoning, Text

Thinks = Literal["no", "at once", "if it says so"]
"""Whether a reply begins with reasoning."""

_OPEN, _CLOSE = "<think>", "</think>"


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
