"""Reads the words of a server's command line as its argparse does, given a table of its flags.

``--flag value``, ``--flag=value``, ``--no-flag``, underscores for dashes, short forms, unambiguous beginnings of flags, and
keys of a table (``--flag.key value``), as vLLM's FlexibleArgumentParser reads them.

A guest's command line -> its flags by name. Those that are not known are kept as they were written, for they may count.

The reading of known flags is `vllm.flag_reader`'s. What is added here is what a key needs: flags nobody knew of, values in
one form (tables as JSON, so that white space makes no other key), and no secret.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Union

from pydantic import JsonValue
from pydantic_core import from_json

from aotgaudi.digest import canonical_json
from aotgaudi.errors import SpecError
from aotgaudi.wrap.values import parse_table, shown
from aotgaudi.wrap.variables import is_secret, is_secret_key, without_credentials

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


_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
_KEY_OF_TABLE = re.compile(r"--[^.=]+\.[^=]+(=.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWords:
    """The words after what starts a server, read.

    Attributes:
        flags: what each flag was given, the last time, by its name without dashes. No secrets.
        positional: words that are no flag's.
        words: all words but secrets, as they were written.
        secrets: the flags that were secrets, likewise. For whoever must know one, never to be kept.
    """

    flags: Mapping[str, JsonValue]
    positional: tuple[str, ...]
    words: tuple[str, ...]
    secrets: Mapping[str, JsonValue] = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A flag with its values, or a word that is no flag's (which has no name)."""

    name: str | None
    words: tuple[str, ...]
    is_known: bool = True


class LaunchReader:
    """Reads the words of one kind of server. Thread-safe."""

    def __init__(
        self,
        flags: Mapping[str, Arity],
        short: Mapping[str, str],
        where: str,
        *,
        significant: frozenset[str] = frozenset(),
    ) -> None:
        """Takes the flags that are known.

        Args:
            flags: arity by name.
            short: ``-x`` -> the name that it stands for.
            where: what errors name that are of no one flag.
            significant: flags whose values are acted on: a beginning of one of them is refused, since a launch that
                listens elsewhere than read is of no use. Any other beginning is taken for a flag nobody knew of.
        """
        self._flags, self._short, self._significant, self._where = flags, short, significant, where
        self._reader = FlagReader(flags, short, where, unknown=self._refused, beginnings=False)

    def read(self, words: Sequence[str]) -> ReadWords:
        """Returns the flags. Raises SpecError for a known flag without its value, or a switch with one."""
        segments = list(self._segments(words))
        known = [word for one in segments if one.is_known for word in one.words]
        given, positional = self._reader.read(known)
        flags = {name: _as_json(value) for name, value in given.items()}
        for one in segments:
            if not one.is_known and one.name is not None:
                flags[one.name] = _unknown_value(one.words)
        secrets = sorted({name for name in flags if is_secret(name)})
        return ReadWords(
            flags={name: flags[name] for name in sorted(flags) if name not in secrets},
            positional=tuple(positional),
            words=tuple(word for one in segments for word in _public(one)),
            secrets={name: flags[name] for name in secrets},
        )

    def renamed(self, words: Sequence[str], name: str, old: str, new: str) -> Iterator[str]:
        """Yields `words` with `new` for `old` where it is the value of the flag `name`, or a word that is no flag's."""
        for one in self._segments(words):
            for word in one.words:
                flag, is_assigned, value = word.partition("=")
                if one.name in (name, None) and word == old:
                    yield new
                elif one.name == name and is_assigned and value == old:
                    yield f"{flag}={new}"
                else:
                    yield word

    def _segments(self, words: Sequence[str]) -> Iterator[_Segment]:
        index = 0
        while index < len(words):
            word = with_dashes(words[index])
            name, is_known = self._named(word)
            following = words[index + 1 :]
            count = self._num_values(word, name, following, is_known=is_known)
            yield _Segment(name, tuple(words[index : index + 1 + count]), is_known)
            index += 1 + count

    def _named(self, word: str) -> tuple[str | None, bool]:
        """Returns the name of a flag, and whether it is known; of another word None, and that it is."""
        if not _is_flag(word):
            return None, True
        part = flag_part(word)
        if part in self._short:
            return self._short[part], True
        if not word.startswith("--"):
            attached = [short for short in self._short if len(short) == 2 and word.startswith(short)]
            return (self._short[attached[0]], True) if attached else (part.lstrip("-"), False)
        name = part[2:]
        positive = name.removeprefix("no-")
        if name in self._flags:
            return name, True
        if self._flags.get(positive) == "switch":
            return positive, True
        self._require_whole(name)
        return word.partition("=")[0][2:], False

    def _require_whole(self, name: str) -> None:
        completions = [flag for flag in self._flags if name and flag.startswith(name)]
        if len(completions) == 1 and completions[0] in self._significant:
            raise SpecError(f"--{name}", f"is the beginning of --{completions[0]}", "the whole name")

    def _num_values(self, word: str, name: str | None, following: Sequence[str], *, is_known: bool) -> int:
        if name is None or "=" in word:
            return 0
        free = next((i for i, other in enumerate(following) if _is_flag(other)), len(following))
        if _KEY_OF_TABLE.fullmatch(word):
            return min(1, len(following))
        if not is_known:
            return free
        if not word.startswith("--") and word not in self._short:
            return 0
        arity = self._flags[name]
        return {"switch": 0, "value": min(1, free), "values": free}[arity]

    def _refused(self, written: str) -> SpecError:
        return SpecError(written, "has keys, and is no table", f"{written} VALUE")


def one_text(flags: Mapping[str, JsonValue], name: str, default: str = "") -> str:
    """Returns the text that a flag was given; of several the first, of a table its JSON."""
    value = flags.get(name)
    if value is None:
        return default
    if isinstance(value, list):
        return str(value[0]) if value else default
    return value if isinstance(value, str) else json.dumps(value)


def one_integer(flags: Mapping[str, JsonValue], name: str, default: int, *, minimum: int = 1) -> int:
    """Returns the integer that a flag was given. Raises SpecError."""
    text = one_text(flags, name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < minimum:
        raise SpecError(f"--{name}", f"is {shown(text)}", f"an integer, {minimum} or more")
    return int(text)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _as_json(value: Given) -> JsonValue:
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    return value if isinstance(value, bool) else _text_or_table(value)


def _text_or_table(text: str) -> JsonValue:
    """Returns a table or list if the text is JSON of one, else the text; neither with secrets."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            value = from_json(text, allow_inf_nan=False)
            canonical_json(value)
        except ValueError:
            return without_credentials(text)
        return _scrubbed(value)
    return without_credentials(text)


def _scrubbed(value: Any) -> JsonValue:
    if isinstance(value, dict):
        return {key: _scrubbed(inner) for key, inner in value.items() if not is_secret_key(key)}
    if isinstance(value, list):
        return [_scrubbed(inner) for inner in value]
    scalar: JsonValue = without_credentials(value) if isinstance(value, str) else value
    return scalar


def _unknown_value(words: Sequence[str]) -> JsonValue:
    flag, *values = words
    _, is_assigned, text = flag.partition("=")
    if is_assigned:
        return _text_or_table(text)
    if not values:
        return True
    return _text_or_table(values[0]) if len(values) == 1 else [_text_or_table(value) for value in values]


def _public(segment: _Segment) -> Iterator[str]:
    """Yields the words of a flag, none of a secret."""
    if segment.name is not None and is_secret(segment.name):
        return
    for word in segment.words:
        flag, is_assigned, text = word.partition("=")
        if segment.name is not None and is_assigned and _is_flag(flag):
            yield f"{flag}={_public_text(text)}"
        else:
            yield _public_text(word)


def _public_text(text: str) -> str:
    """Returns a word as it was written; if it had a secret, without it."""
    if text.lstrip()[:1] not in ("{", "["):
        return without_credentials(text)
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return without_credentials(text)
    public = _scrubbed(value)
    return text if public == value else json.dumps(public)
