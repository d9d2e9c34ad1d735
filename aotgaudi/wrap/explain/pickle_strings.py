"""What a pickle says, without loading it: its texts, and the names that it would import.

A pickle is a program; loading one of somebody else's runs it. Here its opcodes are listed (`pickletools.genops`) and never
carried out. Pickles within pickles (as bytes) are looked through, too, to a depth.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 256 << 20
"""Of a file; larger ones are not looked at."""
_DEPTH = 4
_MAX_OPCODES = 20_000_000
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_BYTES = frozenset({"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"})
_GLOBALS = frozenset({"GLOBAL", "INST"})
_PUTS = frozenset({"BINPUT", "LONG_BINPUT", "PUT"})
_GETS = frozenset({"BINGET", "LONG_BINGET", "GET"})
_SILENT = _PUTS | {"MEMOIZE", "FRAME"}
"""Opcodes that push nothing."""
_PROTOCOL = b"\x80"


@dataclass(frozen=True, slots=True)
class PickleStrings:
    """What was found.

    Attributes:
        texts: every text, in order, repeated as it is there.
        names: ``module name`` of what it would import.
        is_whole: whether it ends as a pickle does. One that was cut off, or was never written, does not.
    """

    texts: tuple[str, ...]
    names: frozenset[str]
    is_whole: bool


def read_pickle_strings(data: bytes) -> PickleStrings:
    """Returns the texts and names of a pickle. Of one that is damaged, what stands before the damage. Raises nothing."""
    texts: list[str] = []
    names: set[str] = set()
    is_whole = _read(data, texts, names, _DEPTH)
    return PickleStrings(tuple(texts), frozenset(names), is_whole)


def _read(data: bytes, texts: list[str], names: set[str], depth: int) -> bool:
    """Adds what a pickle says to `texts` and `names`; returns whether it ends as one.

    A text that is repeated is fetched from the memo; so the memo is kept, of texts alone.
    """
    memo: dict[int, str | None] = {}
    top: str | None = None  # The text that was pushed by the opcode before, if it was one.
    for name, argument in _opcodes(data):
        if name == "MEMOIZE":
            memo[len(memo)] = top
        elif name in _PUTS and isinstance(argument, int):
            memo[argument] = top
        elif name == "STACK_GLOBAL" and len(texts) > 1:
            names.add(f"{texts[-2]} {texts[-1]}")
        elif name in _GLOBALS:
            names.add(str(argument))
        elif name == "STOP":
            return True
        elif name in _BYTES and depth and bytes(argument or b"")[:1] == _PROTOCOL:
            _read(bytes(argument), texts, names, depth - 1)
        top = _text(name, argument, memo) if name not in _SILENT else top
        if top is not None and name not in _SILENT:
            texts.append(top)
    return False


def _text(name: str, argument: Any, memo: Mapping[int, str | None]) -> str | None:
    if name in _TEXTS:
        return str(argument)
    return memo.get(argument) if name in _GETS else None


def _opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yields opcodes up to the end, or up to what is none."""
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            yield opcode.name, argument
            if number > _MAX_OPCODES:
                return
    except (ValueError, OverflowError, MemoryError):
        return
