"""Reads the command line of a vLLM server, by argparse, as vLLM does."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aotgaudi.errors import SpecError
from aotgaudi.wrap.command_line import FlagReader, Given, first, flag_part, split_words, with_dashes
from aotgaudi.wrap.flags import FLAGS, SHORT_FLAGS, Flag, nearest_flag
from aotgaudi.wrap.starts import MODULES, find_vllm
from aotgaudi.wrap.values import Remark, shown

WHERE = "the vLLM command"

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


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
        assignments, words = _server_words(split_words(text, WHERE))
        words = [with_dashes(word) for word in words]
        given = _parsed(words)
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
            assignments=assignments,
            values=values,
            switches={name: value for name, value in taken.items() if isinstance(value, bool)},
            harmless=_remarks(given, "harmless"),
            unknown=_remarks(given, "unknown"),
            notes=tuple(note for word in words for note in _abbreviation(word)),
        )


@functools.cache
def _reader() -> FlagReader:
    return FlagReader(
        {flag.name: flag.arity for flag in FLAGS.values()}, SHORT_FLAGS, WHERE, unknown=_unknown
    )


def _parsed(words: Sequence[str]) -> dict[str, Given]:
    """Returns what each flag was given, ``model`` among them. Raises SpecError for what is no flag of vLLM's."""
    given, rest = _reader().read(words)
    for word in rest:
        if word.startswith("-"):
            raise _unknown(word)
    if len(rest) > 1:
        problem = f"has {shown(rest[1])} beside the model {shown(rest[0])}"
        raise SpecError(WHERE, problem, "one model; a flag before a value")
    return {"model": rest[0], **given} if rest else given


def _unknown(word: str) -> SpecError:
    flag = word.partition("=")[0]
    close = nearest_flag(flag.lstrip("-"))
    remedy = f"did you mean --{close}? " if close else ""
    return SpecError(flag, "is a flag that is not known", f"{remedy}leave it out if it changes no graph")


def _refuse(flag: Flag, value: Given) -> None:
    if flag.effect != "refused" or value is False:
        return
    if value is True:
        raise SpecError(f"--{flag.name}", "cannot be expressed in a spec", flag.reason)
    if first(value) not in flag.neutral:
        raise SpecError(f"--{flag.name}", f"is {shown(first(value))}", flag.reason)


def _remarks(given: Mapping[str, Given], effect: str) -> tuple[Remark, ...]:
    flags = (FLAGS[name] for name in given)
    return tuple(Remark(f"--{flag.name}", flag.reason) for flag in flags if flag.effect == effect)


def _abbreviation(word: str) -> Iterator[str]:
    """Yields a note for a flag that was written by its beginning."""
    name = flag_part(word)
    if word.startswith("--") and name[2:].removeprefix("no-") not in FLAGS:
        whole = (form for flag in FLAGS for form in (f"--{flag}", f"--no-{flag}") if form.startswith(name))
        yield f"{name} is read as {next(whole)}"


def _server_words(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the assignments before a server's command, and the words after it."""
    found = find_vllm(words)
    if found is None:
        raise SpecError(
            WHERE,
            "starts no server" if words else "is empty",
            f"vllm serve MODEL ..., or python -m {MODULES[0]} --model MODEL ...",
        )
    start, after = found
    matches = (_ASSIGNMENT.fullmatch(before) for before in words[:start])
    return {match[1]: match[2] for match in matches if match}, words[after:]
