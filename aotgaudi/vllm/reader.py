"""Reads variables one by one, and remembers which ones counted."""

from __future__ import annotations

from collections.abc import Mapping

from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.vllm.values import FALSE_WORDS, TRUE_WORDS, is_true, parse_integer, shown


class VariableReader:
    """A view of one environment while it is being read; thrown away afterwards."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._heeded: set[str] = set()
        self._notes: list[str] = []

    @property
    def heeded(self) -> frozenset[str]:
        """The variables that were set, read, and not disregarded."""
        return frozenset(self._heeded)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was read otherwise than a person may have meant, one sentence each."""
        return tuple(self._notes)

    def disregard(self, name: str) -> None:
        """Takes back that a variable counts: another one came before it."""
        self._heeded.discard(name)

    def text(self, name: str) -> str | None:
        """Returns a variable's text; None where it is unset."""
        value = self._environment.get(name)
        if value is not None:
            self._heeded.add(name)
        return value

    def boolean(self, name: str, *, is_word_only: bool = False) -> bool | None:
        """Returns what upstream reads from a variable; None where it is unset.

        `is_word_only`: the old extension's reading, where nothing but the word true is true.
        """
        text = self.text(name)
        if text is None:
            return None
        value = text.lower() == "true" if is_word_only else is_true(text)
        if not value and (text.lower() not in FALSE_WORDS):
            words = "true" if is_word_only else "/".join(sorted(TRUE_WORDS))
            self._notes.append(f"{name} is {shown(text)}, which upstream reads as false (true is: {words})")
        return value

    def integer(self, name: str, minimum: int, maximum: int | None) -> int | None:
        """Returns a variable's integer; None where it is unset. Raises SpecError that names it."""
        text = self.text(name)
        if text is None:
            return None
        most = LARGEST_LIMIT if maximum is None else maximum
        return parse_integer(name, text, minimum=minimum, maximum=most)
