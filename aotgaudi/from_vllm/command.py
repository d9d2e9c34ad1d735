"""Reads a vLLM server's command and environment for a spec: what the spec takes, and what it refuses or leaves out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aotgaudi.commands.flags import DEFAULTS, FLAGS, SHORT_FLAGS, VARIABLES, Flag, variable_effect
from aotgaudi.commands.starts import REMEDY, assignments, find_vllm
from aotgaudi.commands.variables import KUBERNETES
from aotgaudi.commands.words import (
    FALSE_WORDS,
    TRUE_WORDS,
    CommandReader,
    CommandWords,
    FlagValue,
    Remark,
    first,
    is_true,
    python_integer,
    split_words,
)
from aotgaudi.errors import SpecError, shown

WHERE = "the vLLM command"

_KNOWN = {name: flag.arity for name, flag in FLAGS.items() if flag.effect != "unread"}
_READER = CommandReader(_KNOWN, SHORT_FLAGS, expands=True)
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
        """Parses ``vllm serve MODEL ...`` or ``python -m vllm.entrypoints.openai.api_server --model MODEL ...``.

        Flags may be abbreviated if that is unambiguous. `words.CommandReader` describes the other forms.

        Raises:
            SpecError: the text starts no server, or has a flag that is unknown or that a spec cannot express.
        """
        words = split_words(text, WHERE)
        found = find_vllm(words)
        if found is None:
            raise SpecError(WHERE, "starts no server" if words else "is empty", REMEDY)
        start, after = found
        read = _READER.read(words[after:])
        given = _require_known(read)
        for name, value in given.items():
            _refuse(FLAGS[name], value)
        taken = {name: value for name, value in given.items() if _is_read(FLAGS[name])}
        values = {name: first(value) for name, value in taken.items() if not isinstance(value, bool)}
        model = values.pop("model", None)
        if not model:
            remedy = "vllm serve MODEL, MODEL a directory or a name on the hub"
            raise SpecError(WHERE, "names no model", remedy)
        return cls(
            model=model,
            assignments=dict(assignments(words[:start])),
            values=values,
            switches={name: value for name, value in taken.items() if isinstance(value, bool)},
            harmless=_remarks(given, "harmless"),
            unknown=_remarks(given, "unknown"),
            notes=read.notes,
        )


def _is_read(flag: Flag) -> bool:
    return flag.effect == "taken" or flag.name in _CHECKED


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


# The environment

_PREFIXES = ("VLLM_", "PT_HPU")
_BLANK = re.compile(r"[ \t]")
_DOCKER_FORM = "NAME=VALUE, no blank in the name and no `export` (--env-file-style compose allows it)"
_COMPOSE_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)(?:\s*=\s*(.*))?")
_QUOTED = re.compile(r"""(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)")\s*(?:\#.*)?""")
_ESCAPED = re.compile(r'\\(["\\])')
_COMMENT = re.compile(r"(?:^|\s)\#")
_EXPANDED = re.compile(r"\$(\w|\{)")
_LITERAL = re.compile(r"""^\s*["']|["']\s*$|\s\#""")


def is_looked_at(name: str) -> bool:
    """Returns whether a variable belongs to vLLM or the bridge, or may change what is warm. All others are ignored."""
    effect = VARIABLES.get(name)
    return name.startswith(_PREFIXES) or (effect is not None and effect.effect != "harmless")


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


EnvFileStyle = Literal["docker", "compose"]
"""Whose rules an environment file follows."""


@dataclass(frozen=True, slots=True)
class EnvFile:
    """The variables of an environment file, and what its user may not expect, one sentence each."""

    values: Mapping[str, str]
    notes: tuple[str, ...] = ()


def parse_env_file(
    text: str, where: str, caller: Mapping[str, str], style: EnvFileStyle = "docker"
) -> EnvFile:
    """Returns the variables of an environment file. The last line for a name counts.

    Lines that are blank or begin with ``#`` are skipped. A name alone takes the value that it has for the `caller`, or is
    skipped with a note.

    ``docker``: as ``docker run --env-file`` (docker/cli, opts/file.go, ``parseKeyValueFile``) and ``kubectl create
    configmap --from-env-file`` (kubernetes/kubectl, pkg/cmd/util/env_file.go) read them. Everything after ``=`` is the
    value, with its quotes, `` #`` and blanks. ``compose``: as env_file of Docker Compose (docs.docker.com, "Syntax for
    environment files"). ``export`` is allowed, quotes are removed, and a ``#`` after a blank begins a comment. Nothing is
    expanded, and values that nobody here looks at stay as they are.

    Raises:
        SpecError: a line has another form. Names its number.
    """
    found: dict[str, str] = {}
    unset: list[str] = []
    for number, line in enumerate(text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").split("\n"), start=1):
        stripped = line.removesuffix("\r").lstrip()
        if stripped and not stripped.startswith("#"):
            name, value = _assignment(stripped, f"{where}:{number}", style)
            value = caller.get(name) if value is None else value
            if value is None:
                unset.append(name)
            else:
                found[name] = value
    return EnvFile(found, tuple(_env_file_notes(found, unset, where, style)))


def _assignment(line: str, where: str, style: EnvFileStyle) -> tuple[str, str | None]:
    """Returns the name and the value of a line; None for a name alone."""
    if style == "docker":
        name, equals, value = line.partition("=")
        if not name or _BLANK.search(name):
            raise SpecError(where, f"is {shown(line)}, which is no assignment", _DOCKER_FORM)
        return name, value if equals else None
    match = _COMPOSE_LINE.fullmatch(line.rstrip())
    if match is None:
        raise SpecError(where, "is no assignment", "NAME=VALUE")
    name, value = match.groups()
    return name, _compose_value(value, where) if value is not None and is_looked_at(name) else value


def _compose_value(text: str, where: str) -> str:
    if text[:1] in ("'", '"'):
        quoted = _QUOTED.fullmatch(text)
        if quoted is None:
            raise SpecError(where, "no closing quotation", "a value without quotes, or between two")
        value = quoted["single"] if quoted["double"] is None else _ESCAPED.sub(r"\1", quoted["double"])
    else:
        value = _COMMENT.split(text, maxsplit=1)[0].rstrip()
    if _EXPANDED.search(value) and not text.startswith("'"):
        raise SpecError(where, f"has {value!r}, which a shell would expand", "the value itself")
    return value


def _env_file_notes(
    values: Mapping[str, str], unset: Sequence[str], where: str, style: EnvFileStyle
) -> Iterator[str]:
    literal = [name for name, value in values.items() if is_looked_at(name) and _LITERAL.search(value)]
    if literal and style == "docker":
        yield (
            f"{where}: the quotes and ' #' in {', '.join(literal)} are part of the value, as for docker run --env-file and"
            " kubectl --from-env-file (--env-file-style compose: as for Docker Compose)"
        )
    missing = [name for name in dict.fromkeys(unset) if name not in values]
    if missing:
        yield f"{where}: skipped {', '.join(missing)}: a name alone takes this environment's value, and there is none"
