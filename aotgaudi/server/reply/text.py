"""A model's text as it comes, and what is made of it.

A parser is a generator. It takes what it needs from a `Text`, yields parts of the reply, and yields None when it cannot go
on without more text. It decides by the text alone, never by where a piece of it ends, so streams and whole replies read
alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar, Union

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls the function `name`. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments (JSON) of the newest call."""

    text: str


Part = Union[Content, Reasoning, CallStart, CallArguments]
Parsing = Generator[Union[Part, None], None, T]

_MAX_HELD_SPACE = 64
"""Characters. A model that writes nothing but line feeds must not look dead."""
_WORD = re.compile(r"[\w.-]*")


class JsonEnd:
    """Finds where a JSON object or array ends. It comes in pieces; what is wrong inside it is not this class's concern."""

    def __init__(self, depth: int = 0, before: str = "") -> None:
        """With `depth`, so many brackets are open already. The value ends before the marker `before` at the latest."""
        self._depth, self._before = depth, before
        self._is_in_string = self._is_escaped = False
        self._signs = re.compile(r'[{}\[\]"\\]' + (f"|{re.escape(before)}" if before else ""))

    def find(self, text: str, start: int) -> tuple[bool, int]:
        """Reads `text` from `start`. Returns whether it has the value's end, and where; if not, where to read on."""
        position = start
        if self._is_escaped and position < len(text):
            self._is_escaped, position = False, position + 1
        while (found := self._signs.search(text, position)) is not None:
            position = found.end()
            if self._is_in_string:
                position += self._pass_sign_of_string(found[0], position == len(text))
            elif found[0] == self._before:
                return True, found.start()
            elif self._pass_sign(found[0]):
                return True, position
        return False, len(text) if self._is_in_string else max(position, start_of_marker(text, self._before))

    def _pass_sign_of_string(self, sign: str, is_last: bool) -> int:
        """Returns how many characters the sign makes mean nothing."""
        if sign == "\\":
            self._is_escaped = is_last
            return 0 if is_last else 1
        self._is_in_string = sign != '"'
        return 0

    def _pass_sign(self, sign: str) -> bool:
        """Returns whether the sign ends the value."""
        self._is_in_string = sign == '"'
        self._depth += (sign in "{[") - (sign in "}]")
        return sign in "}]" and self._depth <= 0


def start_of_marker(text: str, marker: str) -> int:
    """Returns where `text` may have the beginning of `marker` as its end; the length of `text` if it has none."""
    for start in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[start:]):
            return start
    return len(text)


class Text:
    """The text that has come and has not been taken."""

    def __init__(self) -> None:
        self.rest, self.has_ended = "", False

    def take(self, num_chars: int) -> str:
        """Takes the next characters."""
        taken, self.rest = self.rest[:num_chars], self.rest[num_chars:]
        return taken

    def take_word(self, max_chars: int) -> Parsing[str]:
        """Takes the letters, digits, ``_``, ``.`` and ``-`` that come next, and returns them."""
        word = ""
        while True:
            found = _WORD.match(self.rest[: max_chars - len(word)])
            word += self.take(found.end() if found else 0)
            if self.rest or self.has_ended:
                return word
            yield None

    def take_space(self) -> Parsing[str]:
        """Takes white space, all of it, and returns it."""
        space = ""
        while True:
            space += self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or self.has_ended:
                return space
            yield None

    def take_marker(self, *markers: str) -> Parsing[str]:
        """Takes one of `markers`, and the white space before it. Returns both, or nothing if something else follows."""
        longest = max(map(len, markers))
        while True:
            bare = self.rest.lstrip()
            for marker in markers:
                if bare.startswith(marker):
                    return self.take(len(self.rest) - len(bare) + len(marker))
            is_open = len(bare) < longest and any(marker.startswith(bare) for marker in markers)
            if self.has_ended or not is_open:
                return ""
            yield None

    def pass_on_until(
        self, marker: str, part: Callable[[str], Part], *, keeps_space: bool = True
    ) -> Parsing[str]:
        """Yields all text before `marker` as parts, without white space right before it, and takes the marker.

        Returns this white space and the marker. If the text ends before, returns nothing, having passed on everything, or,
        without `keeps_space`, everything but white space at the end.
        """
        while True:
            at = self.rest.find(marker)
            until = at if at >= 0 else start_of_marker(self.rest, marker)
            solid = max(len(self.rest[:until].rstrip()), until - _MAX_HELD_SPACE)
            if solid:
                yield part(self.take(solid))
                at -= solid
            if at >= 0:
                return self.take(at + len(marker))
            if self.has_ended:
                rest = self.take(len(self.rest))
                if rest and (keeps_space or rest.strip()):
                    yield part(rest)
                return ""
            yield None
