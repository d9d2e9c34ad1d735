"""Reads the command line of a vLLM server, by argparse, as vLLM does."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Union

from aotgaudi.errors import SpecError
from aotgaudi.vllm.flags import FLAGS, SHORT_FLAGS, Flag, nearest_flag
from aotgaudi.vllm.values import Remark, parse_table, shown

WHERE = "the vLLM command"

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SHELL_SYNTAX = re.compile(r"\d?(>|<|>>)(&?\d|.+)?|[|&;]+|2>&1")
_KEY = re.compile(r"(--[^.=]+)\.([^=]+)(?:=(.*))?", re.DOTALL)
_AMBIGUOUS = re.compile(r"ambiguous option: (.+?) could match (.+)", re.DOTALL)
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_LONGEST = 100_000

_Given = Union[str, list[str], bool]
"""What a flag was given: its text, its words, or whether a switch is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """A server's command line.

    Attributes:
        model: a local directory, or a name on the hub.
        assignments: ``NAME=VALUE`` words in front of the command.
        values: the text of each flag that a spec takes, by its name without dashes; of several the last.
        switches: each switch that a spec takes; False for its ``--no-`` form.
        harmless: flags that change nothing that is warm, with the reason.
        unknown: flags that may change what is warm and have no place in a spec, with the reason.
        notes: what was read otherwise than written.
    """

    model: str
    assignments: Mapping[str, str]
    values: Mapping[str, str]
    switches: Mapping[str, bool]
    harmless: tuple[Remark, ...]
    unknown: tuple[Remark, ...]
    notes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> VllmCommand:
        """Parses ``vllm serve MODEL ...`` or ``python -m vllm.entrypoints.openai.api_server --model MODEL ...``.

        ``--flag value``, ``--flag=value``, ``--no-flag``, underscores for dashes, unambiguous beginnings of flags,
        ``-tp`` and its like, keys of a table (``--flag.key value``) and continued lines are read as vLLM reads them.

        Raises:
            SpecError: no server's command; an unknown flag; one that a spec cannot express, with the reason.
        """
        assignments, words = _server_words(_split(text))
        words = [_with_dashes(word) for word in words]
        given = _parsed(words)
        for name, value in given.items():
            _refuse(FLAGS[name], value)
        taken = {name: value for name, value in given.items() if FLAGS[name].effect == "taken"}
        values = {name: _first(value) for name, value in taken.items() if not isinstance(value, bool)}
        model = values.pop("model", None)
        if not model:
            remedy = "vllm serve MODEL, MODEL a directory or a name on the hub"
            raise SpecError(WHERE, "names no model", remedy)
        return cls(
            model=model,
            assignments=assignments,
            values=values,
            switches={name: value for name, value in taken.items() if isinstance(value, bool)},
            harmless=_remarks(given, "harmless"),
            unknown=_remarks(given, "unknown"),
            notes=tuple(note for word in words for note in _abbreviation(word)),
        )


class _Parser(argparse.ArgumentParser):
    """Knows vLLM's flags, and raises where argparse would end the process."""

    def __init__(self) -> None:
        super().__init__(
            prog="vllm serve", add_help=False, exit_on_error=False, argument_default=argparse.SUPPRESS
        )
        for flag in FLAGS.values():
            names = [f"--{flag.name}", *(short for short, name in SHORT_FLAGS.items() if name == flag.name)]
            if flag.arity == "switch":
                self.add_argument(*names, dest=flag.name, action=argparse.BooleanOptionalAction)
            else:
                self.add_argument(*names, dest=flag.name, nargs="+" if flag.arity == "values" else None)

    def error(self, message: str) -> NoReturn:
        """Raises SpecError; argparse calls it for a beginning of several flags."""
        ambiguous = _AMBIGUOUS.search(message)
        if ambiguous is None:
            raise SpecError(WHERE, message)
        raise SpecError(ambiguous[1].partition("=")[0], "begins several flags", ambiguous[2])

    def read(self, words: Sequence[str]) -> tuple[dict[str, _Given], list[str]]:
        """Returns what the flags were given, by name, and the words that are no flag's. Raises SpecError."""
        try:
            found, rest = self.parse_known_args(list(words))
        except argparse.ArgumentError as error:
            if error.argument_name is None:
                self.error(error.message)
            raise _misused(error.argument_name.partition("/")[0], error.message) from error
        return vars(found), rest


@functools.cache
def _parser() -> _Parser:
    return _Parser()


def _misused(flag: str, message: str) -> SpecError:
    if message.startswith("expected"):
        return SpecError(flag, "has no value", f"{flag} VALUE")
    given = message.removeprefix("ignored explicit argument ")
    return SpecError(flag, f"is a switch, and is given {given}", "no value")


def _parsed(words: Sequence[str]) -> dict[str, _Given]:
    """Returns what each flag was given, ``model`` among them. Raises SpecError for what is no flag of vLLM's."""
    words, tables = _without_keys(words)
    given, rest = _parser().read(words)
    for word in rest:
        if word.startswith("-"):
            raise _unknown(word)
    if len(rest) > 1:
        problem = f"has {shown(rest[1])} beside the model {shown(rest[0])}"
        raise SpecError(WHERE, problem, "one model; a flag before a value")
    for flag, path, value in tables:
        name = _table_flag(flag)
        table = parse_table(name, _first(given.get(name, "{}")))
        given[name] = json.dumps(_with_key(table, path, value))
    return {"model": rest[0], **given} if rest else given


def _table_flag(written: str) -> str:
    """Returns the name of the flag that a key was written of. Raises SpecError for a switch, and for no flag."""
    read, unread = _parser().read([f"{written}={{}}"])
    if unread:
        raise _unknown(written)
    return next(iter(read))


def _unknown(word: str) -> SpecError:
    flag = word.partition("=")[0]
    close = nearest_flag(flag.lstrip("-"))
    remedy = f"did you mean --{close}? " if close else ""
    return SpecError(flag, "is a flag that is not known", f"{remedy}leave it out if it changes no graph")


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


def _with_key(table: dict[str, object], path: Sequence[str], value: str) -> dict[str, object]:
    """Returns a table with the value at a path of keys replaced; the value is JSON, or else a text."""
    key, *rest = path
    if rest:
        inner = table.get(key)
        return {**table, key: _with_key(inner if isinstance(inner, dict) else {}, rest, value)}
    try:
        return {**table, key: json.loads(value)}
    except (ValueError, RecursionError):
        return {**table, key: value}


def _refuse(flag: Flag, value: _Given) -> None:
    if flag.effect != "refused" or value is False:
        return
    if value is True:
        raise SpecError(f"--{flag.name}", "cannot be expressed in a spec", flag.reason)
    if _first(value) not in flag.neutral:
        raise SpecError(f"--{flag.name}", f"is {shown(_first(value))}", flag.reason)


def _remarks(given: Mapping[str, _Given], effect: str) -> tuple[Remark, ...]:
    flags = (FLAGS[name] for name in given)
    return tuple(Remark(f"--{flag.name}", flag.reason) for flag in flags if flag.effect == effect)


def _first(value: _Given) -> str:
    return value[0] if isinstance(value, list) else str(value)


def _with_dashes(word: str) -> str:
    """Returns a flag with dashes for the underscores of its name; other words as they are."""
    if not word.startswith("--"):
        return word
    name = re.split(r"[.=]", word, maxsplit=1)[0]
    return name.replace("_", "-") + word[len(name) :]


def _abbreviation(word: str) -> Iterator[str]:
    """Yields a note for a flag that was written by its beginning."""
    name = re.split(r"[.=]", word, maxsplit=1)[0]
    if word.startswith("--") and name[2:].removeprefix("no-") not in FLAGS:
        whole = (form for flag in FLAGS for form in (f"--{flag}", f"--no-{flag}") if form.startswith(name))
        yield f"{name} is read as {next(whole)}"


def _split(text: str) -> list[str]:
    if len(text) > _LONGEST:
        raise SpecError(WHERE, f"has {len(text)} characters", f"at most {_LONGEST}")
    try:
        words = shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "), comments=False)
    except ValueError as error:
        raise SpecError(
            WHERE, f"cannot be split into words: {str(error).lower()}", "closed quotes"
        ) from error
    for word in words:
        if _SHELL_SYNTAX.fullmatch(word):
            raise SpecError(WHERE, f"has {shown(word)}, which a shell would read", "the vllm command alone")
        if re.search(r"\$(\w|\{|\()", word):
            raise SpecError(WHERE, f"has {shown(word)}, which a shell would expand", "the value itself")
    return words


def _server_words(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the assignments before a server's command, and the words after it."""
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else None
        is_serve = word.rpartition("/")[2] == "vllm" and after == "serve"
        is_module = word == "-m" and after in _MODULES
        if is_serve or is_module:
            found = (_ASSIGNMENT.fullmatch(before) for before in words[:index])
            return {match[1]: match[2] for match in found if match}, words[index + 2 :]
    raise SpecError(
        WHERE,
        "starts no server" if words else "is empty",
        f"vllm serve MODEL ..., or python -m {_MODULES[0]} --model MODEL ...",
    )
