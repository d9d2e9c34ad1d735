"""After a run that was not warm: what the guest hashed there, against what it hashed in the build; and what it did.

The witness writes down what a guest hashes. The events of the last run stay in its place until the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.errors import SpecError
from aotgaudi.wrap.watch.events import Account, EventReader, History, hashed_factors

_FOLDER = "events"
_TELLING = ("refused", "compile", "generate", "fault")


@dataclass(frozen=True, slots=True)
class HashedFactor:
    """Something that the guest hashed otherwise than in the build. None: it did not hash it there."""

    name: str
    sealed: str | None
    here: str | None


@dataclass(frozen=True, slots=True)
class RunExplained:
    """What a run says of itself.

    Attributes:
        num_processes: that had a witness.
        num_factors: that were hashed.
        factors: those that differ from the build's.
        deeds: what must not happen in a start from sealed files, each in a line.
    """

    num_processes: int
    num_factors: int
    factors: tuple[HashedFactor, ...]
    deeds: tuple[str, ...]


def explain_run(root: Path, sealed: Mapping[str, Mapping[str, str]]) -> RunExplained:
    """Returns what the events in the place at `root` say, against the factors of a capture. Raises SpecError."""
    histories = _histories(root)
    hashed = hashed_factors(histories)
    return RunExplained(
        num_processes=len(histories),
        num_factors=sum(map(len, hashed.values())),
        factors=tuple(_differences(sealed, hashed)),
        deeds=tuple(dict.fromkeys(_deeds(histories))),
    )


def _histories(root: Path) -> tuple[History, ...]:
    account = Account()
    try:
        os.scandir(root / _FOLDER).close()
        account.add(EventReader(root / _FOLDER).read())
    except OSError as error:
        raise SpecError(
            str(root), f"cannot be read as the place of a run: {error.strerror}", "the --root of aotgaudi run"
        ) from error
    if not account.histories:
        raise SpecError(str(root), "has no events of a run", "the --root of aotgaudi run, after it has ended")
    return tuple(account.histories.values())


def _differences(
    sealed: Mapping[str, Mapping[str, str]], here: Mapping[str, Mapping[str, str]]
) -> Iterator[HashedFactor]:
    """Yields what differs in whatever was hashed on both sides: a run that was ended early has hashed less."""
    for group in sorted(sealed.keys() & here.keys()):
        before, after = sealed[group], here[group]
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                yield HashedFactor(f"{group}.{name}", before.get(name), after.get(name))


def _deeds(histories: tuple[History, ...]) -> Iterator[str]:
    for history in histories:
        for event in history.events:
            if event.kind in _TELLING and event.phase != "c":
                what = (
                    event.text("argv")
                    or event.text("path")
                    or f"{event.text('what')} {event.text('name')}".strip()
                )
                stack = f", from {event.stack}" if event.stack else ""
                yield f"{event.kind} in {history.role or 'a process'}: {what}{stack}"
