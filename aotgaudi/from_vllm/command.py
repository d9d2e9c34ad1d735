"""Reads a vLLM command for a spec: which flags the spec takes, and which it refuses or leaves out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from aotgaudi.commands.flags import DEFAULTS, FLAGS, SHORT_FLAGS, Flag
from aotgaudi.commands.starts import REMEDY, assignments, find_vllm
from aotgaudi.commands.values import Remark
from aotgaudi.commands.words import (
    CommandReader,
    CommandWords,
    FlagValue,
    first,
    split_words,
)
from aotgaudi.errors import SpecError, shown

WHERE = "the vLLM command"

_KNOWN = {name: flag.arity for name, flag in FLAGS.items() if flag.effect != "unread"}
_READER = CommandReader(_KNOWN, SHORT_FLAGS, expands=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """A server's command line.

    Attributes:
        model: a local directory, or a name on the hub.
        assignments: ``NAME=VALUE`` words in front of the command.
        values: the text of each flag that a spec takes, by its name without dashes; the last one if given twice.
        switches: each switch that a spec takes; False for its ``--no-`` form.
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
        """Parses ``vllm serve MODEL ...`` or ``python -m vllm.entrypoints.openai.api_server --model MODEL ...``.

        Flags may be abbreviated if that is unambiguous. `words.CommandReader` describes the other forms.

        Raises:
            SpecError: the text starts no server, or has a flag that is unknown or that a spec cannot express.
        """
        assigned, words = _server_words(split_words(text, WHERE))
        read = _READER.read(words)
        given = _require_known(read)
        for name, value in given.items():
            _refuse(FLAGS[name], value)
        taken = {name: value for name, value in given.items() if FLAGS[name].effect == "taken"}
        values = {name: first(value) for name, value in taken.items() if not isinstance(value, bool)}
        model = values.pop("model", None)
        if not model:
            remedy = "vllm serve MODEL, MODEL a directory or a name on the hub"
            raise SpecError(WHERE, "names no model", remedy)
        return cls(
            model=model,
            assignments=assigned,
            values=values,
            switches={name: value for name, value in taken.items() if isinstance(value, bool)},
            harmless=_remarks(given, "harmless"),
            unknown=_remarks(given, "unknown"),
            notes=read.notes,
        )


def _require_known(read: CommandWords) -> dict[str, FlagValue]:
    """Returns the value of each flag, including `model`. Raises SpecError for an unknown flag, and for two models."""
    for flag in read.unknown.values():
        close = difflib.get_close_matches(flag.lstrip("-"), _KNOWN, n=1, cutoff=0.75)
        remedy = f"did you mean --{close[0]}? " if close else ""
        raise SpecError(flag, "is a flag that is not known", f"{remedy}leave it out if it changes no graph")
    model = read.positional
    if len(model) > 1:
        problem = f"has {shown(model[1])} beside the model {shown(model[0])}"
        raise SpecError(WHERE, problem, "one model; a flag before a value")
    return {"model": model[0], **read.given} if model else dict(read.given)


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


def _server_words(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the assignments before a server's command, and the words after it. Raises SpecError if it starts no server."""
    found = find_vllm(words)
    if found is None:
        raise SpecError(
            WHERE,
            "starts no server" if words else "is empty",
            REMEDY,
        )
    start, after = found
    return dict(assignments(words[:start])), words[after:]
