"""Whether a server takes images, as the command line says it."""

from __future__ import annotations

import re
from typing import Any

from aotgaudi.errors import SpecError
from aotgaudi.vllm.command import VllmCommand, parse_table
from aotgaudi.vllm.values import parse_integer, shown

_FLAG = "limit-mm-per-prompt"
_PAIRS = re.compile(r"\w+=\d+(,\w+=\d+)*")


def takes_images(command: VllmCommand) -> bool:
    """Returns whether any image or video may be in a prompt: none may with limits of 0, or for language only.

    --limit-mm-per-prompt is JSON, or ``image=4,video=0`` in older releases. Raises SpecError.
    """
    if command.switches.get("language-model-only", False):
        return False
    text = command.values.get(_FLAG)
    if text is None:
        return True
    if _PAIRS.fullmatch(text):
        pairs = (pair.split("=") for pair in text.split(","))
        limits: dict[str, Any] = {name: parse_integer(f"--{_FLAG}", count) for name, count in pairs}
    else:
        limits = parse_table(_FLAG, text)
    return any(_limit(limits.get(kind, 1)) > 0 for kind in ("image", "video"))


def _limit(value: Any) -> int:
    count = value.get("count", 1) if isinstance(value, dict) else value
    if type(count) is not int or count < 0:
        raise SpecError(f"--{_FLAG}", f"has {shown(str(count))}", "a number of items a prompt")
    return count
