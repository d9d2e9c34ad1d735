"""A model's text as it comes, the parts that parsers find in it, and tools for parsers.

A parser is a generator. It takes text from a `Text`, yields parts of the reply, and yields None when it needs more text to
go on. Its result depends only on the text and not on where the pieces end, so that streamed and whole replies are read
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
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More reasoning."""

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
"""The most white space (in characters) that is held back. A model that writes only line feeds must not look dead."""
_WORD = re.compile(r"[\w.-]*")


class JsonEnd:
    """Finds where a JSON object or array ends that comes in pieces. Does not check whether the JSON is valid."""

    def __init__(self, depth: int = 0, before: str = "") -> None:
        """`depth` brackets are open already. The value ends before the marker `before` at the latest."""
        self._depth, self._before = depth, before
        self._is_in_string = self._is_escaped = False
        self._signs = re.compile(r'[{}\[\]"\\]' + (f"|{re.escape(before)}" if before else ""))

    def find(self, text: str, start: int) -> tuple[bool, int]:
        """Reads `text` from `start`. Returns True and where the value ends, or False and where to read on."""
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
        """Handles a sign within a string. Returns how many of the next characters it escapes."""
        if sign == "\\":
            self._is_escaped = is_last
            return 0 if is_last else 1
        self._is_in_string = sign != '"'
        return 0

    def _pass_sign(self, sign: str) -> bool:
        """Handles a sign outside of strings. Returns whether it ends the value."""
        self._is_in_string = sign == '"'
        self._depth += (sign in "{[") - (sign in "}]")
        return sign in "}]" and self._depth <= 0


def start_of_marker(text: str, marker: str) -> int:
    """Returns where the end of `text` may be the beginning of `marker`; the length of `text` if it is not."""
    for start in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[start:]):
            return start
    return len(text)


class Text:
    """The text that has arrived and was not taken yet."""

    def __init__(self) -> None:
        self.rest, self.has_ended = "", False

    def take(self, num_chars: int) -> str:
        """Takes the next characters and returns them."""
        taken, self.rest = self.rest[:num_chars], self.rest[num_chars:]
        return taken

    def take_word(self, max_chars: int) -> Parsing[str]:
        """Takes the letters, digits, ``_``, ``.`` and ``-`` that come next, at most `max_chars`, and returns them."""
        word = ""
        while True:
            found = _WORD.match(self.rest[: max_chars - len(word)])
            word += self.take(found.end() if found else 0)
            if self.rest or self.has_ended:
                return word
            yield None

    def take_space(self) -> Parsing[str]:
        """Takes all white space that comes next, and returns it."""
        space = ""
        while True:
            space += self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or self.has_ended:
                return space
            yield None

    def take_marker(self, *markers: str) -> Parsing[str]:
        """Takes one of `markers` with the white space before it. Returns both, or an empty text if something else comes."""
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
        """Yields the text before `marker` as parts, except the white space right before it, and takes the marker.

        Returns that white space and the marker. If there is no marker, yields all text and returns an empty text. Without
        `keeps_space`, it then drops a rest that is only white space.
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
