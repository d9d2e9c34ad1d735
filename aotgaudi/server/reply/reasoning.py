"""Where a model thinks: between ``<think>`` and ``</think>``, for vLLM's ``--reasoning-parser`` names.

Some chat templates write ``<think>`` themselves at the end of the prompt, or a whole empty thought where the client wants
none. So the prompt says how the reply begins. If it does not, DeepSeek's R1 thinks at once, with or without a ``<think>``,
and Qwen 3 thinks if it writes one.
"""

from __future__ import annotations

from typing import Literal

from aotgaudi.server.options import ReasoningParser
from aotgaudi.server.reply.text import Parsing, Reasoning, Text

Thinks = Literal["no", "at once", "if it says so"]
"""Whether a reply begins with reasoning."""

_OPEN, _CLOSE = "<think>", "</think>"


def thinks_after(prompt: str, parser: ReasoningParser) -> Thinks:
    """Returns whether a model thinks after `prompt`, the rendered chat template."""
    end = prompt.rstrip()
    if end.endswith(_OPEN):
        return "at once"
    if end.endswith(_CLOSE):
        return "no"
    return "at once" if parser == "deepseek_r1" else "if it says so"


def read_reasoning(text: Text, thinks: Thinks) -> Parsing[None]:
    """Reads what the model thinks before its answer, and the white space around it. A thought that is cut off is one."""
    if thinks == "no":
        return
    marker = yield from text.take_marker(_OPEN)
    if thinks == "if it says so" and not marker:
        return
    yield from text.take_space()
    if (yield from text.pass_on_until(_CLOSE, Reasoning)):
        yield from text.take_space()
