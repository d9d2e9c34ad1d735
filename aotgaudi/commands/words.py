"""Reads a server's command line as the server's argparse does, given the flags that it knows.

``--flag value``, ``--flag=value``, ``--no-flag``, underscores for dashes, short forms, and keys of a table (``--flag.key
value``) are read as vLLM's FlexibleArgumentParser reads them. An unknown flag is kept as written: a spec refuses it, and a
launch's key counts it. In a key, values have one form (tables are JSON, so white space makes no other key) and hold no
secret. The values of flags and variables are parsed strictly: every error names the flag or the variable.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, NoReturn, Union

from pydantic import JsonValue
from pydantic_core import from_json

from aotgaudi.commands.starts import REMEDY
from aotgaudi.commands.variables import is_secret, is_secret_key, without_credentials
from aotgaudi.digest import canonical_json
from aotgaudi.errors import SpecError, shown
from aotgaudi.spec.limits import LARGEST_LIMIT

Arity = Literal["value", "switch", "values"]
"""A ``switch`` takes no word and has a ``--no-`` form. ``values`` takes all words up to the next flag."""

FlagValue = Union[str, tuple[str, ...], bool]
"""The value of a flag: its text, its words, or whether a switch is on."""

_FLAG = re.compile(r"-[^=\s][^=\s]*(=.*)?", re.DOTALL)
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_WRITTEN = re.compile(r"(?P<name>--?[^.=]*)(?:\.(?P<key>[^=]*))?(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Option:
    """A flag with its values, or one word that belongs to no flag.

    Attributes:
        words: as written.
        name: of the flag, without dashes; with the keys if the flag is unknown. None for a word of no flag.
        written: the flag without value and keys, as written except for underscores.
        form: the full spelling of a known flag: ``--name``, ``--no-name`` or a short form; empty for an unknown one.
        keys: where in a known flag's table the value belongs.
        values: the text after ``=``, or the words that the flag takes.
    """

    words: tuple[str, ...]
    name: str | None = None
    written: str = ""
    form: str = ""
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def is_abbreviated(self) -> bool:
        return bool(self.form) and self.written.startswith("--") and self.written != self.form

    @property
    def value(self) -> FlagValue:
        """The value of an unknown flag: its words, if there are several."""
        first, *others = self.values or (True,)
        return self.values if others else first

    def public(self) -> Iterator[str]:
        """Yields the words without secrets."""
        if self.name is None or not is_secret(self.name):
            for word in self.words:
                flag, is_assigned, text = word.partition("=")
                is_value = is_assigned and _is_flag(flag)
                yield f"{flag}={_public(text)}" if is_value else _public(word)


@dataclass(frozen=True, slots=True)
class CommandWords:
    """The parsed words after what starts a server. They include secrets, so `repr` shows only the notes.

    Attributes:
        given: the last value of each known flag, by its name without dashes. JSON for a table whose keys were given.
        unknown: the unknown flags: name without dashes -> the flag as written, without value and keys.
        positional: the words that belong to no flag.
        notes: flags that were abbreviated.
    """

    given: Mapping[str, FlagValue] = field(repr=False)
    unknown: Mapping[str, str] = field(repr=False)
    positional: tuple[str, ...] = field(repr=False)
    notes: tuple[str, ...]
    _options: tuple[_Option, ...] = field(repr=False)

    def flags(self) -> dict[str, JsonValue]:
        """Returns every flag except secrets, in alphabetical order, in a key's form: a text, texts, a switch or a table."""
        return {name: _in_key(value) for name, value in self._values() if not is_secret(name)}

    @property
    def models(self) -> tuple[str, ...]:
        """The words that belong to no flag, then every value of ``--model``."""
        given = (word for one in self._options if one.name == "model" for word in one.values)
        return (*self.positional, *given)

    def one_model(self, where: str, *, is_module: bool = False) -> str:
        """Returns the model of a vLLM command. Raises SpecError for none, and for several.

        ``vllm serve`` refuses a word beside ``--model``. ``python -m`` (`is_module`) takes the last ``--model``, and
        ignores a word, or refuses it (0.10).
        Source: ``parse_args`` of vllm/utils/argparse_utils.py, releases 0.26 and 0.32.
        """
        models = self.models[-1:] if is_module else self.models
        model, *others = models or ("",)
        if is_module and self.positional:
            problem = f"has {shown(self.positional[0])}, which belongs to no flag"
            raise SpecError(where, problem, "--model MODEL; a switch without a value")
        if others:
            problem = f"has {shown(others[0])} beside the model {shown(model)}"
            raise SpecError(where, problem, "one model; a flag before a value")
        if not model:
            raise SpecError(where, "names no model", REMEDY)
        return model

    def secrets(self) -> dict[str, JsonValue]:
        """Returns the flags that are secrets. Never store them."""
        return {name: _in_key(value) for name, value in self._values() if is_secret(name)}

    def public_words(self) -> tuple[str, ...]:
        """Returns all words as written, except secrets."""
        return tuple(word for option in self._options for word in option.public())

    def _values(self) -> list[tuple[str, FlagValue]]:
        unknown = {one.name: one.value for one in self._options if one.name is not None and not one.form}
        return sorted({**self.given, **unknown}.items())


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
        negated = {f"--no-{name}": name for name, arity in flags.items() if arity == "switch"}
        self._forms = {**{f"--{name}": name for name in flags}, **negated, **short}

    def read(self, words: Sequence[str]) -> CommandWords:
        """Returns the flags. Raises SpecError for a known flag without its value, and for a switch with a value."""
        options = tuple(self._options(words))
        given: dict[str, FlagValue] = {}
        for one in sorted(
            options, key=lambda one: len(one.keys) > 0
        ):  # Keys are set in the table that is given.
            if one.name is not None and one.form:
                given[one.name] = self._given(one, one.name, given.get(one.name, "{}"))
        return CommandWords(
            given=given,
            unknown={one.name: one.written for one in options if one.name is not None and not one.form},
            positional=tuple(one.words[0] for one in options if one.name is None),
            notes=tuple(f"{one.written} is read as {one.form}" for one in options if one.is_abbreviated),
            _options=options,
        )

    def renamed(self, words: Sequence[str], name: str, old: str, new: str) -> Iterator[str]:
        """Yields `words` with `old` replaced by `new` where it is the value of the flag `name`, or belongs to no flag."""
        for option in self._options(words):
            for word in option.words:
                flag, is_assigned, value = word.partition("=")
                if option.name in (name, None) and word == old:
                    yield new
                elif option.name == name and is_assigned and value == old:
                    yield f"{flag}={new}"
                else:
                    yield word

    def _options(self, words: Sequence[str]) -> Iterator[_Option]:
        index = 0
        while index < len(words):
            option = self._option(words[index], words[index + 1 :])
            yield option
            index += len(option.words)

    def _option(self, word: str, following: Sequence[str]) -> _Option:
        """Returns the flag in `word` with its values, which are in `word` or are the first of `following`."""
        match = _WRITTEN.fullmatch(word) if _is_flag(word) else None
        if match is None:
            return _Option((word,))
        written, key, value = match["name"], match["key"], match["value"]
        written = written.replace("_", "-") if written.startswith("--") else written
        form = self._form(written)
        if not form and written == word and (attached := self._short.get(word[:2])):
            return _Option((word,), attached, word[:2], form=word[:2], values=(word[2:],))
        name, keys = self._forms.get(form), () if key is None else tuple(key.split("."))
        if value is not None:
            taken: tuple[str, ...] = ()
        elif keys:
            taken = tuple(following[:1])
        else:
            free = tuple(takewhile(lambda other: not _is_flag(other), following))
            most = {"switch": 0, "value": 1, "values": len(free)}
            taken = free[: most["values" if name is None else self._flags[name]]]
        if name is None:
            name = re.sub("^--?", "", f"{written}.{key}" if keys and written.startswith("--") else written)
        values = taken if value is None else (value,)
        return _Option((word, *taken), name, written, form, keys if form else (), values)

    def _form(self, written: str) -> str:
        """Returns the full form of the flag that `written` is or abbreviates; empty for an unknown flag.

        Raises SpecError for an abbreviation of several flags, or of a flag that we act on.
        """
        if written in self._forms:
            return written
        if written == "--":
            return ""
        begun = [form for form in self._forms if form.startswith(written)]
        if self._expands and begun:
            if len(begun) > 1:
                raise SpecError(written, "begins several flags", ", ".join(begun))
            return begun[0]
        names = {
            self._forms[form] for form in begun if form not in self._short and not form.startswith("--no-")
        }
        if written.startswith("--") and len(names) == 1 and names <= self._acted_on:
            raise SpecError(written, f"is the beginning of --{names.pop()}", "the whole name")
        return ""

    def _given(self, option: _Option, name: str, table: FlagValue) -> FlagValue:
        """Returns the value of a known flag; for a key, `table` with its value. Raises SpecError."""
        flag, arity = f"--{name}", self._flags[name]
        if arity == "switch" and not option.keys:
            if option.values:
                raise SpecError(flag, f"is a switch, and is given {option.values[0]!r}", "no value")
            return not option.form.startswith("--no-")
        if not option.values:
            where = option.words[0] if option.keys else flag
            raise SpecError(where, "has no value", f"{where} VALUE")
        if not option.keys:
            return option.values if arity == "values" else option.values[0]
        if arity == "switch":
            raise SpecError(flag, "is a switch, and is given a key", "no value")
        return json.dumps(_set(parse_table(name, first(table)), option.keys, option.values[0]))


def first(value: FlagValue) -> str:
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


def _in_key(value: FlagValue) -> JsonValue:
    """Returns a flag's value in a key's form, without secrets: a table or a list if the text is JSON of one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple):
        return [_in_key(one) for one in value]
    public = _public(value)
    if _is_table(public):
        with contextlib.suppress(ValueError):
            table: JsonValue = from_json(public, allow_inf_nan=False)
            canonical_json(table)
            return table
    return public


def _public(text: str) -> str:
    """Returns a word as written, without any secret that it holds."""
    if _is_table(text):
        with contextlib.suppress(ValueError):
            table = from_json(text, allow_inf_nan=False)
            public = _scrubbed(table)
            return text if public == table else json.dumps(public)
    return without_credentials(text)


def _is_table(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[")


def _scrubbed(value: Any) -> JsonValue:
    if isinstance(value, dict):
        return {key: _scrubbed(inner) for key, inner in value.items() if not is_secret_key(key)}
    if isinstance(value, list):
        return [_scrubbed(inner) for inner in value]
    scalar: JsonValue = without_credentials(value) if isinstance(value, str) else value
    return scalar


# Values

TRUE_WORDS = frozenset({"true", "t", "1", "yes", "y", "on"})
"""Words that upstream reads as true, in any case (vllm_gaudi/extension/config.py, ``boolean``). All others are false."""

FALSE_WORDS = frozenset({"false", "f", "0", "no", "n", "off", ""})
"""Words that users write for false. Other texts are false too, but probably by mistake, so they are noted."""

_DIGITS_AT_MOST = 18
_LONGEST_NUMBER = 60
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Remark:
    """A flag or a variable of the user, and what to know about it."""

    name: str
    text: str


def is_true(text: str) -> bool:
    """Returns the boolean that upstream reads from a variable's text."""
    return text.lower() in TRUE_WORDS


def parse_integer(where: str, text: str, *, minimum: int = 0, maximum: int = LARGEST_LIMIT) -> int:
    """Returns a plain decimal integer. Raises SpecError, naming `where`."""
    stripped = text.strip()
    digits = stripped.lstrip("0") or stripped[-1:]
    if not (stripped.isascii() and stripped.isdigit()) or len(digits) > _DIGITS_AT_MOST:
        _refuse_integer(where, text, minimum, maximum)
    value = int(digits)
    if not minimum <= value <= maximum:
        _refuse_integer(where, text, minimum, maximum)
    return value


def python_integer(where: str, text: str) -> int:
    """Returns what Python's ``int`` reads: ``+5``, ``1_000``, negative and huge numbers too. Raises SpecError."""
    try:
        return int(text)
    except ValueError:
        raise SpecError(where, f"is {shown(text)}", "an integer, as Python reads it") from None


def parse_tokens(where: str, text: str) -> int:
    """Returns a number of tokens, also from ``8k`` (8,000), ``8K`` (8,192), ``25.6k``, ``1M``.

    The forms are vLLM's (vllm/engine/arg_utils.py, ``human_readable_int``). A lower-case suffix is decimal and may follow a
    fraction. A capital one is binary and may not. Raises SpecError.
    """
    match = _SUFFIXED.fullmatch(text.strip()) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        return parse_integer(where, text, minimum=1)
    number, suffix = match.groups()
    if suffix in _BINARY and "." in number:
        raise SpecError(
            where, f"is {text!r}", f"a fraction goes with a decimal suffix: {number}{suffix.lower()}"
        )
    value = int(number) * _BINARY[suffix] if suffix in _BINARY else int(float(number) * _DECIMAL[suffix])
    if not 1 <= value <= LARGEST_LIMIT:
        _refuse_integer(where, text, 1, LARGEST_LIMIT)
    return value


def parse_fraction(where: str, text: str, *, includes_zero: bool, includes_one: bool) -> float:
    """Returns a share between 0 and 1. Raises SpecError."""
    try:
        value = float(text) if len(text) <= _LONGEST_NUMBER and "_" not in text else -1.0
    except ValueError:
        value = -1.0
    is_inside = 0 < value < 1 or (includes_zero and value == 0) or (includes_one and value == 1)
    if not is_inside:
        low, high = (
            ("0 or more" if includes_zero else "above 0"),
            ("at most 1" if includes_one else "below 1"),
        )
        raise SpecError(where, f"is {shown(text)}", f"a number {low} and {high}")
    return value


def parse_table(name: str, text: str) -> dict[str, Any]:
    """Returns the object in a flag's JSON text. Raises SpecError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"--{name}", f"is {shown(text)}", "an object in JSON") from error
    if not isinstance(value, dict):
        raise SpecError(f"--{name}", f"is {shown(text)}", "an object in JSON")
    return value


def _refuse_integer(where: str, text: str, minimum: int, maximum: int) -> NoReturn:
    raise SpecError(where, f"is {shown(text)}", f"an integer from {minimum} to {maximum}")
