"""Reads calls of tools in the formats of models (named as for vLLM's ``--tool-call-parser``) and of constrained replies.

===============  =============================================================================================
``hermes``       ``<tool_call>{"name": F, "arguments": {...}}</tool_call>``, once a call. Hermes 2 Pro, Qwen 2.5 and 3
``llama3_json``  ``{"name": F, "parameters": {...}}`` from the start, ``;`` between calls; ``<|python_tag|>`` may stand first
``mistral``      ``[TOOL_CALLS][{"name": F, "arguments": {...}}, ...]``, or, from its tokenizer's version 11,
                 ``[TOOL_CALLS]F{...}`` once a call, in some models with ``[CALL_ID]ID`` and ``[ARGS]`` after the name
===============  =============================================================================================

A call begins once its name is known and its arguments have begun. From there on, the model's text counts as arguments, even
if they turn out to be cut off or invalid JSON, as in OpenAI's API. All other text is content, word for word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Literal, Union

from aotgaudi.server.options import ToolCallParser
from aotgaudi.server.reply.text import CallArguments, CallStart, Content, JsonEnd, Parsing, Text

Calls = Union[ToolCallParser, Literal["list", "one"]]
"""How calls are written. "list" is a JSON array of ``{"name", "parameters"}``, "one" is the arguments of one call alone."""

_MAX_NAME_CHARS = 256
_HEAD = re.compile(
    r'\s{0,64}\{\s{0,64}"name"\s{0,64}:\s{0,64}"([^"\\\x00-\x1f]{1,256})"\s{0,64},'
    r'\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
"""A call up to its arguments, as models usually write it. Calls that are written differently are read once complete."""


def read_calls(text: Text, calls: Calls, function: str = "") -> Parsing[None]:
    """Reads a text that may call tools. `function` is the one that a reply of the kind "one" calls."""
    if calls == "one":
        return _read_arguments_alone(text, function)
    return _READERS[calls](text)


def pass_rest(text: Text, part: Callable[[str], Content | CallArguments]) -> Parsing[None]:
    """Yields all remaining text as parts."""
    while True:
        if text.rest:
            yield part(text.take(len(text.rest)))
        if text.has_ended:
            return
        yield None


def _read_hermes(text: Text) -> Parsing[None]:
    end, has_called = "</tool_call>", False
    while lead := (yield from text.pass_on_until("<tool_call>", Content, keeps_space=not has_called)):
        if (yield from _read_call(text, lead, end)):
            has_called = True
            yield from text.take_marker(end)


def _read_llama(text: Text) -> Parsing[None]:
    tag, has_called = "<|python_tag|>", False
    lead = yield from text.take_marker(tag)
    while True:
        lead += yield from text.take_space()
        if (yield from _read_call(text, lead)):
            has_called = True
            lead = yield from text.take_marker(";", ",")
            if lead:
                continue
        lead = yield from text.pass_on_until(tag, Content, keeps_space=not has_called)
        if not lead:
            return


def _read_mistral(text: Text) -> Parsing[None]:
    has_called = False
    while lead := (yield from text.pass_on_until("[TOOL_CALLS]", Content, keeps_space=not has_called)):
        lead += yield from text.take_space()
        if text.rest.startswith("["):
            has_called |= yield from _read_array(text, lead)
        elif text.rest.startswith("{"):
            has_called |= yield from _read_call(text, lead)
        else:
            has_called |= yield from _read_named(text, lead)


def _read_named(text: Text, lead: str) -> Parsing[bool]:
    """Reads a call in the format of Mistral's newer models. If there is none, yields `lead` and the text read as content."""
    name = yield from text.take_word(_MAX_NAME_CHARS)
    lead += name
    if marker := (yield from text.take_marker("[CALL_ID]")):
        lead += marker
        lead += yield from text.take_word(_MAX_NAME_CHARS)
    lead += yield from text.take_marker("[ARGS]")
    lead += yield from text.take_space()
    if not name or not text.rest.startswith("{"):
        yield Content(lead)
        return False
    yield CallStart(name)
    yield from _pass_arguments(text)
    return True


def _read_list(text: Text) -> Parsing[None]:
    """Reads the array of calls that a constraint enforces. Drops a call that is cut off before its arguments."""
    space = yield from text.take_space()
    if text.rest.startswith("["):
        for part in _read_array(text, space):
            if not isinstance(part, Content):
                yield part
    while not text.has_ended:
        text.take(len(text.rest))
        yield None


def _read_array(text: Text, lead: str) -> Parsing[bool]:
    """Reads calls in an array, whose bracket comes next. Returns whether it had a call."""
    lead += text.take(1)
    has_called = False
    while (yield from _read_call(text, lead)):
        has_called = True
        lead = yield from text.take_marker(",", "]")
        if not lead.endswith(","):
            break
    return has_called


def _read_arguments_alone(text: Text, function: str) -> Parsing[None]:
    while not text.rest:
        if text.has_ended:
            return
        yield None
    yield CallStart(function)
    yield from pass_rest(text, CallArguments)


_READERS: Mapping[str, Callable[[Text], Parsing[None]]] = {
    "hermes": _read_hermes,
    "llama3_json": _read_llama,
    "mistral": _read_mistral,
    "list": _read_list,
}


# One call


def _read_call(text: Text, lead: str, end: str = "") -> Parsing[bool]:
    """Reads a call that is a JSON object and ends before the marker `end` at the latest. Returns whether there was one.

    If there is none, yields `lead` and the text read as content.
    """
    value, position, has_value = JsonEnd(before=end), 0, False
    while True:
        if head := _HEAD.match(text.rest):
            text.take(head.end())
            yield CallStart(head[1])
            yield from _pass_arguments(text, end)
            yield from _skip_members(text, end)
            return True
        bare = text.rest.lstrip()
        if bare and not bare.startswith("{"):
            yield Content(lead)
            return False
        has_value, position = value.find(text.rest, position)
        if has_value or text.has_ended:
            break
        yield None
    raw = text.take(position if has_value else len(text.rest))
    call = _decoded(raw)
    if call is None:
        yield Content(lead + raw)
        return False
    yield CallStart(call[0])
    yield CallArguments(call[1])
    return True


def _pass_arguments(text: Text, end: str = "") -> Parsing[None]:
    value, position = JsonEnd(before=end), 0
    while True:
        has_value, position = value.find(text.rest, position)
        if position:
            yield CallArguments(text.take(position))
            position = 0
        if has_value:
            return
        if text.has_ended:
            yield CallArguments(text.take(len(text.rest)))
            return
        yield None


def _skip_members(text: Text, end: str) -> Parsing[None]:
    """Drops the text after a call's arguments up to its closing bracket, which some models forget."""
    while not (bare := text.rest.lstrip()):
        if text.has_ended:
            return
        yield None
    if bare[0] not in ",}":
        return
    value, position, has_value = JsonEnd(depth=1, before=end), 0, False
    while not has_value:
        has_value, position = value.find(text.rest, 0)
        text.take(position)
        if has_value or text.has_ended:
            return
        yield None


def _decoded(raw: str) -> tuple[str, str] | None:
    """Returns name and arguments of the call `raw`; None if `raw` is not a call."""
    try:
        call = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return (name, arguments) if _is_object(arguments) else None
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments or {}, ensure_ascii=False)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
