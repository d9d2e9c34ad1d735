"""Reads the command line of a vLLM server, as argparse would read it there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotgaudi.errors import SpecError
from aotgaudi.vllm.flags import SHORT_FLAGS, Flag, find_flag, nearest_flag
from aotgaudi.vllm.values import shown

WHERE = "the vLLM command"

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SHELL_SYNTAX = re.compile(r"\d?(>|<|>>)(&?\d|.+)?|[|&;]+|2>&1")
_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d+)?")
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_LONGEST = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """A server's command line.

    Attributes:
        model: a local directory, or a name on the hub.
        assignments: ``NAME=VALUE`` words in front of the command.
        values: the text of each flag that a spec takes, by its name without dashes; of several the last.
        switches: each switch that a spec takes; False for its ``--no-`` form.
        without_effect: flags that change no graph, as written.
        notes: what was read otherwise than written.
    """

    model: str
    assignments: Mapping[str, str]
    values: Mapping[str, str]
    switches: Mapping[str, bool]
    without_effect: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> VllmCommand:
        """Parses ``vllm serve MODEL ...`` or ``python -m vllm.entrypoints.openai.api_server --model MODEL ...``.

        ``--flag value``, ``--flag=value``, ``--no-flag``, underscores for dashes, unambiguous beginnings of flags,
        ``-tp`` and its like, and continued lines are read as vLLM reads them.

        Raises:
            SpecError: no server's command; an unknown flag; one that a spec cannot express, with the reason.
        """
        assignments, words = _server_words(_split(text))
        reading = _Reading()
        reading.read(words)
        model = reading.values.pop("model", None) or reading.positional
        if model is None:
            raise SpecError(
                WHERE, "names no model", "vllm serve MODEL, MODEL a directory or a name on the hub"
            )
        return cls(
            model=model,
            assignments=assignments,
            values=reading.values,
            switches=reading.switches,
            without_effect=tuple(reading.without_effect),
            notes=tuple(reading.notes),
        )


class _Reading:
    """The words of one command while they are read."""

    def __init__(self) -> None:
        self.positional: str | None = None
        self.values: dict[str, str] = {}
        self.switches: dict[str, bool] = {}
        self.without_effect: list[str] = []
        self.notes: list[str] = []

    def read(self, words: list[str]) -> None:
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("-"):
                self._take_model(word)
                continue
            name, dot, key, value = _parted(word)
            flag, is_negated = _known(word, name)
            if flag.name != name.removeprefix("no-") and word.startswith("--"):
                self.notes.append(f"{word} is read as --{flag.name}")
            if flag.arity == "switch":
                _refuse_value(word, value)
                self._take_switch(flag, word, is_on=not is_negated)
            else:
                values = [value] if value is not None else _values(flag, word, rest)
                self._take_values(flag, word, values, key if dot else None)

    def _take_model(self, word: str) -> None:
        if self.positional is not None:
            raise SpecError(
                WHERE,
                f"has {shown(word)} beside the model {shown(self.positional)}",
                "one model; a flag before a value",
            )
        self.positional = word

    def _take_switch(self, flag: Flag, word: str, *, is_on: bool) -> None:
        if flag.refusal is not None and is_on:
            raise SpecError(f"--{flag.name}", "cannot be expressed in a spec", flag.refusal)
        if flag.is_taken:
            self.switches[flag.name] = is_on
        elif flag.refusal is None:
            self.without_effect.append(word)

    def _take_values(self, flag: Flag, word: str, values: list[str], key: str | None) -> None:
        if flag.refusal is not None:
            if key is not None or any(value not in flag.neutral for value in values):
                raise SpecError(f"--{flag.name}", f"is {shown(' '.join(values))}", flag.refusal)
        elif not flag.is_taken:
            self.without_effect.append(word.partition("=")[0])
        elif key is not None:
            self.values[flag.name] = _with_key(flag, self.values.get(flag.name), key, values[0])
        else:
            self.values[flag.name] = values[0]


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


def _parted(word: str) -> tuple[str, str, str, str | None]:
    """Returns the parts of ``--name.key=value``: name, dot, key, value (None without ``=``)."""
    head, equals, value = word.partition("=")
    if not head.startswith("--"):
        if head.startswith("-O") and len(head) > 2:
            head, equals, value = "-O", "=", head[2:]
        return head, "", "", value if equals else None
    name, dot, key = head[2:].partition(".")
    return name.replace("_", "-"), dot, key, value if equals else None


def _known(word: str, name: str) -> tuple[Flag, bool]:
    """Returns the flag of a word, and whether it is its ``--no-`` form. Raises SpecError for an unknown one."""
    flag = find_flag(SHORT_FLAGS.get(name, name)) if name.strip("-") else None
    if flag is not None:
        return flag, False
    negated = find_flag(name.removeprefix("no-")) if name.startswith("no-") else None
    if negated is not None and negated.arity == "switch":
        return negated, True
    close = nearest_flag(name)
    remedy = f"did you mean --{close}? " if close else ""
    raise SpecError(
        word.partition("=")[0], "is a flag that is not known", f"{remedy}leave it out if it changes no graph"
    )


def _refuse_value(word: str, value: str | None) -> None:
    if value is not None:
        raise SpecError(word.partition("=")[0], f"is a switch, and is given {shown(value)}", "no value")


def _values(flag: Flag, word: str, rest: list[str]) -> list[str]:
    """Takes a flag's values off `rest`: one, or for ``values`` flags all up to the next flag."""
    taken: list[str] = []
    while rest and (not rest[0].startswith("-") or _NEGATIVE_NUMBER.fullmatch(rest[0])):
        taken.append(rest.pop(0))
        if flag.arity == "value":
            break
    if not taken:
        raise SpecError(word, "has no value", f"{word} VALUE")
    return taken


def _with_key(flag: Flag, text: str | None, key: str, value: str) -> str:
    """Returns a JSON flag's text with one key set, as ``--speculative-config.num_speculative_tokens 3`` does."""
    table = parse_table(flag.name, text) if text is not None else {}
    try:
        table[key] = json.loads(value)
    except ValueError:
        table[key] = value
    return json.dumps(table)


def parse_table(name: str, text: str) -> dict[str, Any]:
    """Returns the object that a flag's JSON text is. Raises SpecError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"--{name}", f"is {shown(text)}", "an object in JSON") from error
    if not isinstance(value, dict):
        raise SpecError(f"--{name}", f"is {shown(text)}", "an object in JSON")
    return value
