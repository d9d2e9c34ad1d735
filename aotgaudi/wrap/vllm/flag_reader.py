"""Reads the words of a server's command line as its argparse does, given a table of its flags.

``--flag value``, ``--flag=value``, ``--no-flag``, underscores for dashes, short forms, unambiguous beginnings of flags, and
keys of a table (``--flag.key value``), as vLLM's FlexibleArgumentParser reads them.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Union

from aotgaudi.errors import SpecError
from aotgaudi.wrap.vllm.values import parse_table, shown

Arity = Literal["value", "switch", "values"]
"""``switch`` flags have a ``--no-`` form; ``values`` flags take all words up to the next flag."""

Given = Union[str, list[str], bool]
"""What a flag was given: its text, its words, or whether a switch is on."""

LONGEST = 100_000
"""Characters of a command."""

_SHELL_SYNTAX = re.compile(r"\d?(>|<|>>)(&?\d|.+)?|[|&;]+|2>&1")
_KEY = re.compile(r"(--[^.=]+)\.([^=]+)(?:=(.*))?", re.DOTALL)
_AMBIGUOUS = re.compile(r"ambiguous option: (.+?) could match (.+)", re.DOTALL)


class FlagReader:
    """Reads words by one table of flags. Thread-safe."""

    def __init__(
        self,
        flags: Mapping[str, Arity],
        short: Mapping[str, str],
        where: str,
        *,
        unknown: Callable[[str], SpecError],
        beginnings: bool = True,
    ) -> None:
        """Takes a table.

        Args:
            flags: arity by name, without dashes.
            short: ``-x`` -> the name that it stands for.
            where: what errors name that are of no one flag.
            unknown: the error for a flag that is not in the table, as written.
            beginnings: whether an unambiguous beginning of a flag stands for it.
        """
        self.flags, self.short, self.where = flags, short, where
        self._unknown = unknown
        self._parser = _Parser(flags, short, where, beginnings=beginnings)

    def read(self, words: Sequence[str]) -> tuple[dict[str, Given], list[str]]:
        """Returns what each flag was given, the last time, by name; and the words that are no flag's nor a value of one.

        A table that keys were given of is returned as JSON. A word of the rest that begins with a dash is an unknown flag.

        Raises:
            SpecError: a flag without its value, a value for a switch, a beginning of several flags, a key of no table.
        """
        words, tables = _without_keys([with_dashes(word) for word in words])
        given, rest = self._parser.read(words)
        for flag, path, value in tables:
            name = self._table_flag(flag)
            table = parse_table(name, first(given.get(name, "{}")))
            given[name] = json.dumps(_with_key(table, path, value))
        return given, rest

    def _table_flag(self, written: str) -> str:
        """Returns the name of the flag that a key was written of. Raises SpecError for a switch, and for no flag."""
        read, unread = self._parser.read([f"{written}={{}}"])
        if unread:
            raise self._unknown(written)
        return next(iter(read))


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def __init__(
        self, flags: Mapping[str, Arity], short: Mapping[str, str], where: str, *, beginnings: bool
    ) -> None:
        super().__init__(
            prog="serve",
            add_help=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=beginnings,
        )
        self._where = where
        for flag, arity in flags.items():
            names = [f"--{flag}", *(written for written, name in short.items() if name == flag)]
            if arity == "switch":
                self.add_argument(*names, dest=flag, action=argparse.BooleanOptionalAction)
            else:
                self.add_argument(*names, dest=flag, nargs="+" if arity == "values" else None)

    def error(self, message: str) -> NoReturn:
        """Raises SpecError; argparse calls it for a beginning of several flags."""
        ambiguous = _AMBIGUOUS.search(message)
        if ambiguous is None:
            raise SpecError(self._where, message)
        raise SpecError(ambiguous[1].partition("=")[0], "begins several flags", ambiguous[2])

    def read(self, words: Sequence[str]) -> tuple[dict[str, Given], list[str]]:
        """Returns what the flags were given, by name, and the words that are no flag's. Raises SpecError."""
        try:
            found, rest = self.parse_known_args(list(words))
        except argparse.ArgumentError as error:
            if error.argument_name is None:
                self.error(error.message)
            raise _misused(error.argument_name.partition("/")[0], error.message) from error
        return vars(found), rest


def split_words(text: str, where: str) -> list[str]:
    """Returns the words of a command, continued lines joined. Raises SpecError for what only a shell could read."""
    if len(text) > LONGEST:
        raise SpecError(where, f"has {len(text)} characters", f"at most {LONGEST}")
    try:
        words = shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "), comments=False)
    except ValueError as error:
        raise SpecError(
            where, f"cannot be split into words: {str(error).lower()}", "closed quotes"
        ) from error
    for word in words:
        if _SHELL_SYNTAX.fullmatch(word):
            raise SpecError(where, f"has {shown(word)}, which a shell would read", "the vllm command alone")
        if re.search(r"\$(\w|\{|\()", word):
            raise SpecError(where, f"has {shown(word)}, which a shell would expand", "the value itself")
    return words


def with_dashes(word: str) -> str:
    """Returns a flag with dashes for the underscores of its name; other words as they are."""
    if not word.startswith("--"):
        return word
    name = flag_part(word)
    return name.replace("_", "-") + word[len(name) :]


def flag_part(word: str) -> str:
    """Returns what stands before a value or a key: ``--a`` of ``--a=1`` and of ``--a.b``."""
    return re.split(r"[.=]", word, maxsplit=1)[0]


def first(value: Given) -> str:
    """Returns the text, or the first of the texts, that a flag was given."""
    return value[0] if isinstance(value, list) else str(value)


def _misused(flag: str, message: str) -> SpecError:
    if message.startswith("expected"):
        return SpecError(flag, "has no value", f"{flag} VALUE")
    given = message.removeprefix("ignored explicit argument ")
    return SpecError(flag, f"is a switch, and is given {given}", "no value")


def _without_keys(words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str], str]]]:
    """Takes ``--flag.key value`` out; returns the other words, and ``(flag, keys, value)`` of each of these."""
    rest: list[str] = []
    keys: list[tuple[str, list[str], str]] = []
    left = iter(words)
    for word in left:
        found = _KEY.fullmatch(word)
        if found is None:
            rest.append(word)
            continue
        value = found[3] if found[3] is not None else next(left, None)
        if value is None:
            raise SpecError(word, "has no value", f"{word} VALUE")
        keys.append((found[1], found[2].split("."), value))
    return rest, keys


def _with_key(table: dict[str, Any], path: Sequence[str], value: str) -> dict[str, Any]:
    """Returns a table with the value at a path of keys replaced; the value is JSON, or else a text."""
    key, *rest = path
    if rest:
        inner = table.get(key)
        return {**table, key: _with_key(inner if isinstance(inner, dict) else {}, rest, value)}
    try:
        return {**table, key: json.loads(value)}
    except (ValueError, RecursionError):
        return {**table, key: value}
