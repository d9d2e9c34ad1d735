"""The environment of a vLLM server: reads it, sorts the variables that no spec takes, and parses environment files."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aotgaudi.errors import SpecError, shown
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.wrap.flags import VARIABLES, variable_effect
from aotgaudi.wrap.values import FALSE_WORDS, TRUE_WORDS, Remark, is_true, parse_integer
from aotgaudi.wrap.variables import KUBERNETES

_PREFIXES = ("VLLM_", "PT_HPU")
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")


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
        self._heeded: set[str] = set()
        self._notes: list[str] = []

    @property
    def heeded(self) -> frozenset[str]:
        """The variables that were set and read, except disregarded ones."""
        return frozenset(self._heeded)

    @property
    def notes(self) -> tuple[str, ...]:
        """Values that upstream reads differently from what the user may expect, one sentence each."""
        return tuple(self._notes)

    def disregard(self, name: str) -> None:
        """Marks a variable as not heeded because another one takes precedence."""
        self._heeded.discard(name)

    def text(self, name: str) -> str | None:
        """Returns a variable's text; None if it is unset."""
        value = self._environment.get(name)
        if value is not None:
            self._heeded.add(name)
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

    def integer(self, name: str, minimum: int, maximum: int | None) -> int | None:
        """Returns a variable's integer; None if it is unset. Raises SpecError, naming the variable."""
        text = self.text(name)
        if text is None:
            return None
        most = LARGEST_LIMIT if maximum is None else maximum
        return parse_integer(name, text, minimum=minimum, maximum=most)


def parse_env_file(text: str, where: str) -> dict[str, str]:
    """Returns the variables of an environment file, read as docker and shells do. The last line for a name counts.

    Blank lines and lines that begin with ``#`` are skipped, ``export`` is allowed, quotes are removed, and a ``#`` after a
    space begins a comment. Nothing is expanded. The values of other programs' variables are left unparsed.

    Raises:
        SpecError: a line has another form. Names its number.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None:
            raise SpecError(f"{where}:{number}", "is no assignment", "NAME=VALUE")
        name, value = match.groups()
        found[name] = _unquoted(value, f"{where}:{number}") if is_looked_at(name) else value
    return found


def _unquoted(text: str, where: str) -> str:
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise SpecError(where, str(error).lower(), "a value without quotes, or between two") from error
    value = " ".join(words)
    if re.search(r"\$(\w|\{)", value) and not text.startswith("'"):
        raise SpecError(where, f"has {value!r}, which a shell would expand", "the value itself")
    return value
