"""Reads a server's command line as the server's argparse does, given the flags that it knows.

``--flag value``, ``--flag=value``, ``--no-flag``, underscores for dashes, short forms, and keys of a table (``--flag.key
value``) are read as vLLM's FlexibleArgumentParser reads them. An unknown flag is kept as written: a spec refuses it, and a
launch's key counts it. In a key, values have one form (tables are JSON, so white space makes no other key) and hold no
secret.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from pydantic import JsonValue
from pydantic_core import from_json

from aotgaudi.commands.values import parse_table
from aotgaudi.commands.variables import is_secret, is_secret_key, without_credentials
from aotgaudi.digest import canonical_json
from aotgaudi.errors import SpecError, shown

Arity = Literal["value", "switch", "values"]
"""A ``switch`` takes no word and has a ``--no-`` form. ``values`` takes all words up to the next flag."""

Given = Union[str, tuple[str, ...], bool]
"""The value of a flag: its text, its words, or whether a switch is on."""

LONGEST = 100_000
"""The most characters of a command."""

_SHELL_SYNTAX = re.compile(r"\d?(>|<|>>)(&?\d|.+)?|[|&;]+|2>&1")
_FLAG = re.compile(r"-[^=\s][^=\s]*(=.*)?", re.DOTALL)
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_WRITTEN = re.compile(r"(?P<name>--?[^.=]*)(?:\.(?P<key>[^=]*))?(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A flag with its values, or one word that belongs to no flag.

    Attributes:
        words: as written.
        name: of the flag, without dashes. None for a word of no flag.
        is_known: False for an unknown flag, whose name is what was written.
        form: the full spelling of the flag: ``--name``, ``--no-name`` or a short form.
        keys: where in the flag's table the value belongs.
        value: the value after ``=``.
    """

    words: tuple[str, ...]
    name: str | None = None
    is_known: bool = True
    form: str = ""
    keys: tuple[str, ...] = ()
    value: str | None = None

    @property
    def note(self) -> str:
        """A note for the user about an abbreviated flag; else empty."""
        written = flag_part(with_dashes(self.words[0]))
        is_abbreviated = self.is_known and written.startswith("--") and written != self.form
        return f"{written} is read as {self.form}" if is_abbreviated else ""


@dataclass(frozen=True, slots=True)
class CommandWords:
    """The parsed words after what starts a server. They include secrets, so `repr` shows only the notes.

    Attributes:
        given: the last value of each known flag, by its name without dashes. JSON for a table whose keys were given.
        unknown: the unknown flags, as written except for the dashes, each with its words.
        positional: the words that belong to no flag.
        notes: flags that were abbreviated.
    """

    given: Mapping[str, Given] = field(repr=False)
    unknown: Mapping[str, tuple[str, ...]] = field(repr=False)
    positional: tuple[str, ...] = field(repr=False)
    notes: tuple[str, ...]
    _segments: tuple[_Segment, ...] = field(repr=False)

    def flags(self) -> dict[str, JsonValue]:
        """Returns every flag except secrets, in alphabetical order, in a key's form: a text, texts, a switch or a table."""
        return {name: value for name, value in self._values() if not is_secret(name)}

    def secrets(self) -> dict[str, JsonValue]:
        """Returns the flags that are secrets. Never store them."""
        return {name: value for name, value in self._values() if is_secret(name)}

    def public_words(self) -> tuple[str, ...]:
        """Returns all words as written, except secrets."""
        return tuple(word for segment in self._segments for word in _public(segment))

    def _values(self) -> Iterator[tuple[str, JsonValue]]:
        known = {name: _as_json(value) for name, value in self.given.items()}
        unknown = {name: _unknown_value(words) for name, words in self.unknown.items()}
        yield from sorted({**known, **unknown}.items())


class CommandReader:
    """Reads the words of one kind of server. Thread-safe."""

    def __init__(
        self,
        flags: Mapping[str, Arity],
        short: Mapping[str, str],
        *,
        acted_on: frozenset[str] = frozenset(),
        expands: bool = False,
    ) -> None:
        """Takes the flags that the server knows.

        Args:
            flags: arity by name.
            short: ``-x`` -> the name that it stands for.
            acted_on: flags whose values we act on. An abbreviation of one of them is refused, because we must not misread,
                say, the port that the server listens on. Any other abbreviation is an unknown flag.
            expands: whether every unambiguous abbreviation is read as the flag that it begins.
        """
        self._flags, self._short, self._acted_on, self._expands = flags, short, acted_on, expands
        self._forms = {f"--{name}": name for name in flags}
        self._forms |= {f"--no-{name}": name for name, arity in flags.items() if arity == "switch"}

    def read(self, words: Sequence[str]) -> CommandWords:
        """Returns the flags. Raises SpecError for a known flag without its value, and for a switch with a value."""
        segments = tuple(self._segments(words))
        given: dict[str, Given] = {}
        for segment in segments:
            if segment.name is not None and segment.is_known and not segment.keys:
                given[segment.name] = self._given(segment)
        for segment in segments:
            if segment.name is not None and segment.is_known and segment.keys:
                given[segment.name] = self._with_key(segment, given.get(segment.name, "{}"))
        return CommandWords(
            given=given,
            unknown={one.name: one.words for one in segments if one.name is not None and not one.is_known},
            positional=tuple(one.words[0] for one in segments if one.name is None),
            notes=tuple(one.note for one in segments if one.name is not None and one.note),
            _segments=segments,
        )

    def renamed(self, words: Sequence[str], name: str, old: str, new: str) -> Iterator[str]:
        """Yields `words` with `old` replaced by `new` where it is the value of the flag `name`, or belongs to no flag."""
        for segment in self._segments(words):
            for word in segment.words:
                flag, is_assigned, value = word.partition("=")
                if segment.name in (name, None) and word == old:
                    yield new
                elif segment.name == name and is_assigned and value == old:
                    yield f"{flag}={new}"
                else:
                    yield word

    def _segments(self, words: Sequence[str]) -> Iterator[_Segment]:
        index = 0
        while index < len(words):
            segment = self._segment(words[index], words[index + 1 :])
            yield segment
            index += len(segment.words)

    def _segment(self, word: str, following: Sequence[str]) -> _Segment:
        """Returns a word as a segment with its values, which are the first of `following`."""
        match = _WRITTEN.fullmatch(with_dashes(word)) if _is_flag(word) else None
        if match is None:
            return _Segment((word,))
        written, key, value = match["name"], match["key"], match["value"]
        form, name = self._form(written)
        if name is None and written == word and (attached := self._short.get(word[:2])):
            return _Segment((word,), attached, form=word[:2], value=word[2:])
        if value is not None:
            count = 0
        elif key is not None:
            count = min(1, len(following))
        else:
            free = next((i for i, other in enumerate(following) if _is_flag(other)), len(following))
            arity = "values" if name is None else self._flags[name]
            count = {"switch": 0, "value": min(1, free), "values": free}[arity]
        taken = (word, *following[:count])
        if name is None:
            dotted = written if key is None or not written.startswith("--") else f"{written}.{key}"
            return _Segment(taken, re.sub("^--?", "", dotted), is_known=False)
        return _Segment(
            taken, name, form=form, keys=() if key is None else tuple(key.split(".")), value=value
        )

    def _form(self, written: str) -> tuple[str, str | None]:
        """Returns the full form of the flag that `written` is or abbreviates, and the flag's name; None for an unknown flag.

        Raises SpecError for an abbreviation of several flags, or of a flag that we act on.
        """
        if written in self._short:
            return written, self._short[written]
        forms = self._forms
        if written in forms or written == "--":
            return written, forms.get(written)
        begun = [form for form in (*forms, *self._short) if form.startswith(written)]
        if self._expands and begun:
            if len(begun) > 1:
                raise SpecError(written, "begins several flags", ", ".join(begun))
            return begun[0], forms.get(begun[0]) or self._short[begun[0]]
        names = {forms[form] for form in begun if form in forms and not form.startswith("--no-")}
        if written.startswith("--") and len(names) == 1 and names <= self._acted_on:
            raise SpecError(written, f"is the beginning of --{names.pop()}", "the whole name")
        return written, None

    def _given(self, segment: _Segment) -> Given:
        """Returns the value of a known flag. Raises SpecError."""
        flag, arity = f"--{segment.name}", self._flags[str(segment.name)]
        if arity == "switch":
            if segment.value is not None:
                raise SpecError(flag, f"is a switch, and is given {segment.value!r}", "no value")
            return not segment.form.startswith("--no-")
        values = segment.words[1:] if segment.value is None else (segment.value,)
        if not values:
            raise SpecError(flag, "has no value", f"{flag} VALUE")
        return values if arity == "values" else values[0]

    def _with_key(self, segment: _Segment, given: Given) -> Given:
        """Returns the flag's table as JSON, with the value of one key added. Raises SpecError."""
        name, word = str(segment.name), segment.words[0]
        value = segment.value if segment.value is not None else "".join(segment.words[1:2])
        if segment.value is None and len(segment.words) < 2:
            raise SpecError(word, "has no value", f"{word} VALUE")
        if self._flags[name] == "switch":
            raise SpecError(f"--{name}", "is a switch, and is given a key", "no value")
        return json.dumps(_set(parse_table(name, first(given)), segment.keys, value))


def split_words(text: str, where: str) -> list[str]:
    """Returns the words of a command, with continued lines joined. Raises SpecError for text that needs a shell."""
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
    """Returns a flag with the underscores of its name replaced by dashes. Returns other words unchanged."""
    if not word.startswith("--"):
        return word
    name = flag_part(word)
    return name.replace("_", "-") + word[len(name) :]


def flag_part(word: str) -> str:
    """Returns the part before a value or a key: ``--a`` of ``--a=1`` and of ``--a.b``."""
    return re.split(r"[.=]", word, maxsplit=1)[0]


def first(value: Given) -> str:
    """Returns the text of a flag, or its first text."""
    return value[0] if isinstance(value, tuple) else str(value)


def one_text(flags: Mapping[str, JsonValue], name: str, default: str = "") -> str:
    """Returns the text of a flag: the first of several texts, the JSON of a table."""
    value = flags.get(name)
    if value is None:
        return default
    if isinstance(value, list):
        return str(value[0]) if value else default
    return value if isinstance(value, str) else json.dumps(value)


def one_integer(flags: Mapping[str, JsonValue], name: str, default: int, *, minimum: int = 1) -> int:
    """Returns the integer value of a flag. Raises SpecError."""
    text = one_text(flags, name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < minimum:
        raise SpecError(f"--{name}", f"is {shown(text)}", f"an integer, {minimum} or more")
    return int(text)


def _is_flag(word: str) -> bool:
    return _FLAG.fullmatch(word) is not None and _NUMBER.fullmatch(word) is None


def _set(table: dict[str, Any], keys: Sequence[str], value: str) -> dict[str, Any]:
    """Returns a table with the value at a path of keys replaced. The value is read as JSON if possible, else as text."""
    key, *rest = keys
    if rest:
        inner = table.get(key)
        return {**table, key: _set(inner if isinstance(inner, dict) else {}, rest, value)}
    try:
        return {**table, key: json.loads(value)}
    except (ValueError, RecursionError):
        return {**table, key: value}


def _as_json(value: Given) -> JsonValue:
    if isinstance(value, tuple):
        return [_text_or_table(one) for one in value]
    return value if isinstance(value, bool) else _text_or_table(value)


def _text_or_table(text: str) -> JsonValue:
    """Returns a table or list if the text is JSON of one, else the text. Secrets are removed."""
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
    """Yields the words of a flag without secrets."""
    if segment.name is not None and is_secret(segment.name):
        return
    for word in segment.words:
        flag, is_assigned, text = word.partition("=")
        if segment.name is not None and is_assigned and _is_flag(flag):
            yield f"{flag}={_public_text(text)}"
        else:
            yield _public_text(word)


def _public_text(text: str) -> str:
    """Returns a word as written, without any secret that it holds."""
    if text.lstrip()[:1] not in ("{", "["):
        return without_credentials(text)
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        return without_credentials(text)
    public = _scrubbed(value)
    return text if public == value else json.dumps(public)
