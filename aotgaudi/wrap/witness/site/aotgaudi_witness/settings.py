"""What the witness is told: by environment variables that whoever starts the guest sets, and by one byte in a file.

The byte says what the guest is at.

========  ======================================================================================
byte      meaning
========  ======================================================================================
``c``     cold: caches are empty, and compiling is what is wanted
``l``     load: from sealed files, before the server is healthy; what compiles is refused
``m``     measure: as load, but what compiles is reported
``e``     exercise: healthy, and asked what it was asked when it was built; what compiles is reported
``v``     live: what compiles is reported
``f``     flush: caches that are written late are to be written now
========  ======================================================================================
"""

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
"""A file of one byte: what the guest is at."""
ALLOWED = "AOTGAUDI_WITNESS_ALLOWED"
"""A file that lists what is sealed: absolute paths, one a line."""
REPAIRS = "AOTGAUDI_WITNESS_REPAIRS"
"""Which repairs to apply, separated by commas."""
INTERVAL = "AOTGAUDI_WITNESS_INTERVAL"
"""Seconds between two looks at the state and at counters; `INTERVAL_SECONDS` where nothing is said."""
INTERVAL_SECONDS = 0.25

COLD, LOAD, LIVE, FLUSH = "clvf"
"""The states in which the witness does something else than in the others."""


@dataclass(frozen=True)
class Settings:
    """What the environment says. `mistakes` are variables that could not be read: the witness is blind there.

    Attributes:
        roots: Absolute, without a slash at the end, longest first: as they are named, and with no link on their way.
        allowed: What is sealed, by every path that leads there by `roots`; or None where nothing is yet.
        mistakes: Variable -> what is wrong with it.
    """

    events: str
    roots: tuple[str, ...] = ()
    state: str | None = None
    allowed: frozenset[str] | None = None
    repairs: frozenset[str] = frozenset()
    interval: float = INTERVAL_SECONDS
    mistakes: Mapping[str, str] = field(default_factory=dict)


def read_settings(environ: Mapping[str, str]) -> Settings | None:
    """Returns what `environ` says, or None where it does not ask for a witness. Never raises."""
    events = environ.get(EVENTS)
    if not events:
        return None
    mistakes: dict[str, str] = {}
    named = _roots(environ.get(ROOTS, "[]"), mistakes)
    real = {root: os.path.realpath(root) for root in named}
    return Settings(
        events=os.path.abspath(events),
        roots=tuple(sorted({*real, *real.values()}, key=len, reverse=True)),
        state=environ.get(STATE),
        allowed=_allowed(environ.get(ALLOWED), real, mistakes),
        repairs=frozenset(filter(None, environ.get(REPAIRS, "").split(","))),
        interval=_interval(environ.get(INTERVAL), mistakes),
        mistakes=mistakes,
    )


def _interval(text: str | None, mistakes: dict[str, str]) -> float:
    try:
        seconds = float(text) if text else INTERVAL_SECONDS
    except ValueError as error:
        mistakes[INTERVAL] = str(error)
        return INTERVAL_SECONDS
    return min(max(seconds, 0.01), 10.0)


def _roots(text: str, mistakes: dict[str, str]) -> list[str]:
    try:
        return [os.path.abspath(os.fspath(root)) for root in json.loads(text)]
    except (TypeError, ValueError) as error:
        mistakes[ROOTS] = str(error)
        return []


def _allowed(path: str | None, real: Mapping[str, str], mistakes: dict[str, str]) -> frozenset[str] | None:
    if not path:
        return None
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:
            listed = frozenset(filter(None, lines.read().split("\n")))
    except OSError as error:
        mistakes[ALLOWED] = str(error)
        return frozenset()
    elsewhere = (
        real[root] + sealed[len(root) :]
        for root in real
        for sealed in listed
        if real[root] != root and sealed.startswith(root + os.sep)
    )
    return listed.union(elsewhere)


class State:
    """Reads the byte. Thread-safe; never raises."""

    def __init__(self, path: str | None) -> None:
        """`path` is None where nobody says what the guest is at: then it is cold for ever."""
        self._path = path
        self._last = COLD

    def read(self) -> str:
        """Returns the byte as it is now; the last one that was there, where none is."""
        self._last = self._told() or self._last
        return self._last

    def is_told(self) -> bool:
        """Whether there is a byte to be read."""
        return bool(self._told())

    def _told(self) -> str:
        if self._path is None:
            return ""
        try:
            with open(self._path, "rb", buffering=0) as file:
                return file.read(1).decode("ascii")
        except (OSError, ValueError):
            return ""
