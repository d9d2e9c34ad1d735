"""What the witness is told, by environment variables that whoever starts the guest sets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

EVENTS = "AOTGAUDI_WITNESS"
"""The folder for event files. Where it is not set the witness does nothing at all."""
ROOTS = "AOTGAUDI_WITNESS_ROOTS"
"""JSON: a list of the folders that are watched."""
STATE = "AOTGAUDI_WITNESS_STATE"
"""A file of one byte: what the guest is at (`aotgaudi_witness.state`)."""
ALLOWED = "AOTGAUDI_WITNESS_ALLOWED"
"""A file that lists what is sealed: paths, one a line, relative to the root that they lie in."""
REPAIRS = "AOTGAUDI_WITNESS_REPAIRS"
"""Which repairs to apply, separated by commas."""
ROLE = "AOTGAUDI_WITNESS_ROLE"
"""What this process is, where its name does not tell."""


@dataclass(frozen=True)
class Settings:
    """What the environment says. `mistakes` are variables that could not be read: the witness is blind there.

    Attributes:
        roots: Absolute, without a slash at the end, longest first.
        allowed: What is sealed, or None where nothing is yet.
        mistakes: Variable -> what is wrong with it.
    """

    events: str
    roots: tuple[str, ...] = ()
    state: str | None = None
    allowed: frozenset[str] | None = None
    repairs: frozenset[str] = frozenset()
    role: str | None = None
    mistakes: Mapping[str, str] = field(default_factory=dict)


def read_settings(environ: Mapping[str, str]) -> Settings | None:
    """Returns what `environ` says, or None where it does not ask for a witness. Never raises."""
    events = environ.get(EVENTS)
    if not events:
        return None
    mistakes: dict[str, str] = {}
    return Settings(
        events=os.path.abspath(events),
        roots=_roots(environ.get(ROOTS, "[]"), mistakes),
        state=environ.get(STATE),
        allowed=_allowed(environ.get(ALLOWED), mistakes),
        repairs=frozenset(filter(None, environ.get(REPAIRS, "").split(","))),
        role=environ.get(ROLE),
        mistakes=mistakes,
    )


def _roots(text: str, mistakes: dict[str, str]) -> tuple[str, ...]:
    try:
        named = [os.path.abspath(os.fspath(root)) for root in json.loads(text)]
    except (TypeError, ValueError) as error:
        mistakes[ROOTS] = str(error)
        return ()
    return tuple(sorted({*named, *map(os.path.realpath, named)}, key=len, reverse=True))


def _allowed(path: str | None, mistakes: dict[str, str]) -> frozenset[str] | None:
    if not path:
        return None
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:
            return frozenset(filter(None, lines.read().split("\n")))
    except OSError as error:
        mistakes[ALLOWED] = str(error)
        return frozenset()
