"""Reads a vLLM server's command and environment for a spec: what the spec takes, and what it refuses or leaves out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.commands.flags import (
    DEFAULTS,
    FLAGS,
    SHORT_FLAGS,
    VARIABLES,
    Flag,
    is_looked_at,
    variable_effect,
)
from aotgaudi.commands.forms import read_form
from aotgaudi.commands.shell import read_script
from aotgaudi.commands.starts import REMEDY, PlainCommand, assignments, find_vllm, has_one_api_server
from aotgaudi.commands.variables import KUBERNETES
from aotgaudi.commands.words import (
    FALSE_WORDS,
    TRUE_WORDS,
    CommandReader,
    FlagValue,
    Remark,
    first,
    is_true,
    python_integer,
)
from aotgaudi.errors import SpecError, shown

WHERE = "the vLLM command"

KNOWN = {name: flag.arity for name, flag in FLAGS.items() if flag.effect != "unread"}
_READER = CommandReader(KNOWN, SHORT_FLAGS, expands=True)
_CHECKED = frozenset(
    {
        "async-scheduling",
        "long-prefill-token-threshold",
        "max-long-partial-prefills",
        "max-num-partial-prefills",
    }
)
"""Flags that no spec has, with values that vLLM may refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """A server's command line.

    Attributes:
        model: a local directory, or a name on the hub.
        assignments: ``NAME=VALUE`` words in front of the command.
        values: the text of each flag that a spec takes, by its name without dashes; the last one if given twice.
        switches: each switch that a spec takes; False for its ``--no-`` form. Both also have those of `_CHECKED`.
        harmless: flags that do not change what is warm, with the reason.
        unknown: flags that may change what is warm but have no field in a spec, with the reason.
        notes: flags that were abbreviated.
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
        """Reads a command as it is kept. Raises SpecError, see `read_kept` and `of`."""
        return cls.of(read_kept(text, {}, Path()).words)

    @classmethod
    def of(cls, words: Sequence[str]) -> VllmCommand:
        """Reads ``vllm serve MODEL ...`` or ``python -m vllm.entrypoints.openai.api_server --model MODEL ...``.

        Flags may be abbreviated if that is unambiguous. `words.CommandReader` describes the other forms.

        Raises:
            SpecError: the words start no server, or have a flag that is unknown or that a spec cannot express.
        """
        found = find_vllm(words)
        if found is None:
            raise SpecError(WHERE, "starts no server" if words else "is empty", REMEDY)
        start, after = found
        read = _READER.read(words[after:])
        for flag in read.unknown.values():
            close = difflib.get_close_matches(flag.lstrip("-"), KNOWN, n=1, cutoff=0.75)
            remedy = f"{f'did you mean --{close[0]}? ' if close else ''}leave it out if it changes no graph"
            raise SpecError(flag, "is a flag that is not known", remedy)
        for name, value in read.given.items():
            _refuse(FLAGS[name], value)
        taken = {n: v for n, v in read.given.items() if FLAGS[n].effect == "taken" or n in _CHECKED}
        values = {n: first(v) for n, v in taken.items() if n != "model" and not isinstance(v, bool)}
        return cls(
            model=read.one_model(WHERE, is_module=has_one_api_server(words)),
            assignments=dict(assignments(words[:start])),
            values=values,
            switches={name: value for name, value in taken.items() if isinstance(value, bool)},
            harmless=_remarks(read.given, "harmless"),
            unknown=_remarks(read.given, "unknown"),
            notes=read.notes,
        )


def read_kept(text: str, caller: Mapping[str, str], cwd: Path) -> PlainCommand:
    """Returns the command in a text: plain, in a shell's script, behind ``docker run``, with a file of flags.

    Raises:
        SpecError: something of it cannot be read.
    """
    return read_form(read_script(text.replace("\r\n", "\n"), WHERE, {}), caller, cwd)


def _refuse(flag: Flag, value: FlagValue) -> None:
    if flag.effect != "refused" or value is False:
        return
    if value is True:
        raise SpecError(f"--{flag.name}", "cannot be expressed in a spec", flag.reason)
    if first(value) not in (DEFAULTS.get(flag.name), *flag.no_op):
        raise SpecError(f"--{flag.name}", f"is {shown(first(value))}", flag.reason)


def _remarks(given: Mapping[str, FlagValue], effect: str) -> tuple[Remark, ...]:
    flags = (FLAGS[name] for name in given)
    return tuple(Remark(f"--{flag.name}", flag.reason) for flag in flags if flag.effect == effect)


# The environment


@dataclass(frozen=True, slots=True)
class OtherVariables:
    """Variables that have no field in a spec, in alphabetical order, each with its effect."""

    unknown: tuple[Remark, ...]
    harmless: tuple[Remark, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> OtherVariables:
        """Sorts names into those that may change what is warm and those that do not."""
        ordered = sorted(names)
        reasons = {name: _why_harmless(name) for name in ordered}
        return cls(
            tuple(Remark(name, _why_unknown(name)) for name, reason in reasons.items() if reason is None),
            tuple(Remark(name, reason) for name, reason in reasons.items() if reason is not None),
        )


def _why_harmless(name: str) -> str | None:
    if KUBERNETES.fullmatch(name):
        return "set by Kubernetes for a service"
    effect = variable_effect(name)
    return effect.reason if effect is not None and effect.effect == "harmless" else None


def _why_unknown(name: str) -> str:
    effect = variable_effect(name)
    if effect is not None and effect.reason:
        return f"{effect.reason}: set it alike where graphs are built and where they run"
    close = difflib.get_close_matches(name, filter(is_looked_at, VARIABLES), n=1, cutoff=0.8)
    return f"not known: did you mean {close[0]}?" if close else "not known"


class VariableReader:
    """Reads the variables of one environment and remembers which of them counted."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._read: set[str] = set()
        self._notes: list[str] = []

    @property
    def read(self) -> frozenset[str]:
        """The variables that were set and read, except disregarded ones."""
        return frozenset(self._read)

    @property
    def notes(self) -> tuple[str, ...]:
        """Values that upstream reads differently from what the user may expect, one sentence each."""
        return tuple(self._notes)

    def disregard(self, name: str) -> None:
        """Takes a variable back, which another one or its value leaves without effect."""
        self._read.discard(name)

    def text(self, name: str) -> str | None:
        """Returns a variable's text; None if it is unset."""
        value = self._environment.get(name)
        if value is not None:
            self._read.add(name)
        return value

    def boolean(self, name: str, *, is_word_only: bool = False) -> bool | None:
        """Returns the boolean that upstream reads from a variable; None if it is unset.

        `is_word_only`: only the word true means true, as in the old extension.
        """
        text = self.text(name)
        if text is None:
            return None
        value = text.lower() == "true" if is_word_only else is_true(text)
        if not value and (text.lower() not in FALSE_WORDS):
            words = "true" if is_word_only else "/".join(sorted(TRUE_WORDS))
            self._notes.append(f"{name} is {shown(text)}, which upstream reads as false (true is: {words})")
        return value

    def integer(self, name: str) -> int | None:
        """Returns the integer that Python reads from a variable; None if it is unset. Raises SpecError, naming it."""
        text = self.text(name)
        return None if text is None else python_integer(name, text)
