"""Reads the variables in an environment file, by the rules of docker or of Docker Compose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aotgaudi.commands.flags import is_looked_at
from aotgaudi.commands.shell import Unread
from aotgaudi.errors import SpecError, shown

_BLANK = re.compile(r"[ \t]")
_DOCKER_FORM = "NAME=VALUE, no blank in the name and no `export` (--env-file-style compose allows it)"
_COMPOSE_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)(?:\s*=\s*(.*))?")
_QUOTED = re.compile(r"""(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)")\s*(?:\#.*)?""")
_ESCAPED = re.compile(r'\\(["\\])')
_COMMENT = re.compile(r"(?:^|\s)\#")
_EXPANDED = re.compile(r"\$(\w|\{)")
_LITERAL = re.compile(r"""^\s*["']|["']\s*$|\s\#""")

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
    expanded: a value that Compose would expand is refused, or `Unread` if nobody here looks at its variable.

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
    try:
        return name, None if value is None else _compose_value(value, where)
    except SpecError:
        if is_looked_at(name):
            raise
        return name, Unread(value, value)


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
