"""Turns token ids into text, piece by piece, without half characters, and cuts the text at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"
"""The character that decoders write for bytes that are not (yet) a character."""

_MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most 4 bytes, and a token at least one, so a character spans at most 4 tokens."""

_MAX_HELD_TOKENS = 2 * _MAX_CHARACTER_TOKENS


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text as they come. Use one instance for each sequence, on one thread.

    If a text from `decode` does not end with U+FFFD, it must not change when tokens are appended. This holds for byte-level
    and sentencepiece decoders on valid UTF-8. Then the joined results of `push` and `flush` are the part of
    ``decode(context + tokens)`` after ``decode(context)``.

    `context` holds the tokens before the output. A few of them are kept, because some decoders drop a space at the start of
    a text. A context that ends inside a character is not used.

    As in vLLM and TGI, only a window of the newest tokens is decoded. It begins at the second to last place where the text
    ended with a whole character. So the cost of a token does not grow with the length of the output.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = (), *, max_context_tokens: int = 6) -> None:
        self._decode = decode
        self._window = list(context[max(len(context) - max_context_tokens, 0) :])
        self._text = decode(self._window) if self._window else ""
        if self._text.endswith(REPLACEMENT):
            self._window, self._text = [], ""
        self._num_sent_chars = len(self._text)
        self._num_read_tokens = len(self._window)

    def push(self, token_id: int) -> str:
        """Takes the next token, and returns the text that is now certain. It may be empty."""
        text = self._decode([*self._window, token_id])
        if text and text == self._text and not text.endswith(REPLACEMENT):
            return ""  # An invisible (special) token would only widen the window.
        self._window.append(token_id)
        self._text = text
        if text.endswith(REPLACEMENT):
            return self._cut_garbage()
        piece = text[self._num_sent_chars :]
        if piece:
            self._restart_window(self._num_read_tokens)
        return piece

    def flush(self) -> str:
        """Returns the text that was held back, with U+FFFD for half a character. Do not push afterwards."""
        return self._text[self._num_sent_chars :]

    def _restart_window(self, start: int) -> None:
        """Drops the window's first `start` tokens. Call it when all text of the window was returned."""
        del self._window[:start]
        self._text = self._decode(self._window)
        self._num_sent_chars, self._num_read_tokens = len(self._text), len(self._window)

    def _cut_garbage(self) -> str:
        """Returns the beginning of a long run of bytes that are no characters, cut where the text splits cleanly."""
        num_tokens = len(self._window)
        if num_tokens - self._num_read_tokens <= _MAX_HELD_TOKENS:
            return ""
        for cut in range(num_tokens - _MAX_CHARACTER_TOKENS, num_tokens - 2 * _MAX_CHARACTER_TOKENS, -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if head + tail == self._text:
                piece = head[self._num_sent_chars :]
                self._window, self._text = self._window[cut:], tail
                self._num_sent_chars = self._num_read_tokens = 0
                return piece
        return ""


class StopChecker:
    """Cuts a text that comes in pieces before the stop string that is complete first. Use it on one thread.

    If several stop strings are complete at the same character, the longest counts. So the result depends only on the text,
    not on the pieces. Text that may be the start of a stop string is held back.

    With `keeps_stop`, the text is cut after the stop string.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops, self._keeps_stop = tuple(stops), keeps_stop
        self._max_stop_len = max(map(len, self._stops), default=0)
        self._held = ""
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was `found`."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Takes the next piece, and returns the text that is certain. Once `is_stopped`, it returns nothing."""
        if self.is_stopped or not text:
            return ""
        if not self._stops:
            return text
        self._held += text
        cut = self._find_cut()
        if cut is not None:
            piece, self._held = self._held[:cut], ""
            return piece
        hold_start = self._find_possible_stop()
        piece, self._held = self._held[:hold_start], self._held[hold_start:]
        return piece

    def flush(self) -> str:
        """Returns the text that was held back. Call it when the text has ended."""
        piece, self._held = self._held, ""
        return piece

    def _find_cut(self) -> int | None:
        found = [(self._held.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        end, start, self.found = min(ends)
        return end if self._keeps_stop else start

    def _find_possible_stop(self) -> int:
        first = max(len(self._held) - self._max_stop_len + 1, 0)
        for start in range(first, len(self._held)):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(self._held)
