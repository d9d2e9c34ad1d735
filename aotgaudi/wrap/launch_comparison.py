"""Compares two launches: what prevents the use of a capture here, and which conditions must be established first.

A capture is for one launch. A difference in the key is refused: with exit code 3 if the request differs (a flag, a variable,
the model), with 5 if the machine differs (software, instruction sets). A different condition is established if that is
possible, and otherwise named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.launch import Launch
from aotgaudi.commands.variables import VariableRules
from aotgaudi.digest import differing
from aotgaudi.errors import AotGaudiError, NotWarmError, TargetError, shortened
from aotgaudi.wrap.launch import ServerCommand, server_kind
from aotgaudi.wrap.launch_machine import satisfies

_OF_MACHINE = ("software.", "target.", "guest", "place.")
_ROOT, _MODEL = "place.root", "model.name"
_FEATURES = "target.isa"
_SWITCH = {"true": "on", "false": "off"}


@dataclass(frozen=True)
class Checked:
    """A launch that has been checked and may be started.

    Attributes:
        bundle: The open bundle. If a signature was demanded, it is valid. Launch and receipt are those that the bundle
            names.
        found: The command.
        here: The command's launch.
        why_cold: Why it must start cold, in one sentence; empty if it need not.
    """

    bundle: Bundle
    found: ServerCommand
    here: Launch
    why_cold: str

    @property
    def launch(self) -> Launch:
        """The launch whose conditions the sandbox establishes: the sealed one, or for a cold start the requested one."""
        return self.here if self.why_cold else self.bundle.launch


@dataclass(frozen=True, slots=True)
class Difference:
    """A component or a condition that differs. None means that the side lacks it."""

    name: str
    sealed: str | None
    here: str | None

    @property
    def error(self) -> type[AotGaudiError]:
        """The class of the error for a refusal."""
        return TargetError if self.name.startswith(_OF_MACHINE) else NotWarmError

    @property
    def shown(self) -> tuple[str, str]:
        """Both sides for people, the sealed one first: of features and of long texts, what the other side lacks."""
        if self.name == _FEATURES and self.sealed is not None and self.here is not None:
            sealed, here = self.sealed.split(), self.here.split()
            return _features(sealed, here), _features(here, sealed)
        shown = plain(self.name, self.sealed), plain(self.name, self.here)
        if shown[0] != shown[1] or self.sealed == self.here or self.sealed is None or self.here is None:
            return shown
        pairs = enumerate(zip_longest(self.sealed, self.here))
        same = next(at for at, (one, other) in pairs if one != other)
        return f"...{plain('', self.sealed[same:])}", f"...{plain('', self.here[same:])}"

    def __str__(self) -> str:
        """``flag.max-model-len is 1024, the capture was built for 512``."""
        sealed, here = self.shown
        return f"{self.name} is {here}, the capture was built for {sealed}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a launch differs from the sealed one.

    Attributes:
        components: differences in the key, which make the capture unusable here.
        unmet: conditions that cannot be established here, so that the server would not use its own files.
        established: conditions that differ, and that restoring the capture establishes.
    """

    components: tuple[Difference, ...] = ()
    unmet: tuple[Difference, ...] = ()
    established: tuple[Difference, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether the capture can be used."""
        return not self.components and not self.unmet

    @property
    def error(self) -> type[AotGaudiError]:
        """The class of the error for a refusal: TargetError if the machine differs, regardless of other differences."""
        differences = (*self.components, *self.unmet)
        return TargetError if any(one.error is TargetError for one in differences) else NotWarmError

    @property
    def exit_code(self) -> int:
        """0 if the launches are the same, else the exit code of the refusal."""
        return 0 if self.is_same else self.error.exit_code

    def sentence(self) -> str:
        """Returns one sentence with the decisive difference and the number of others."""
        found = [*self.components, *self.unmet]
        if not found:
            return "the launch is the sealed one"
        first = next(one for one in found if one.error is self.error)
        others = f" (and {len(found) - 1} more: aotgaudi explain BUNDLE -- COMMAND)" if len(found) > 1 else ""
        return f"{first}{others}"


def compare(sealed: Launch, here: Launch, rules: VariableRules) -> Comparison:
    """Returns how `here` differs from `sealed`, by the rules of the server.

    Additional CPU features are no difference.
    """
    differences = _differences(dict(sealed.components()), dict(here.components()))
    if satisfies(here.target, sealed.target):
        differences = tuple(one for one in differences if not one.name.startswith("target."))
    conditions = _differences(dict(sealed.conditions()), dict(here.conditions()))
    unmet = tuple(one for one in conditions if not _can_be_established(one, sealed, rules))
    established = tuple(one for one in conditions if one not in unmet)
    return Comparison(differences, unmet, established)


def plain(name: str, value: str | None) -> str:
    """Returns a component's value for people: shortened, and without JSON quotes for a flag."""
    if value is None:
        absent = {"flag": "(default)", "world": "1"}
        return absent.get(name.partition(".")[0], "(not there)")
    if name.startswith("flag."):
        value = _SWITCH.get(value) or (json.loads(value) if value.startswith('"') else value)
    return shortened(" ".join(value.split()) or "(none)")


def _features(features: Sequence[str], others: Sequence[str]) -> str:
    more = [one for one in features if one not in others]
    return plain(_FEATURES, f"one with {' '.join(more)}" if more else "one with fewer")


def _differences(sealed: dict[str, str], here: dict[str, str]) -> tuple[Difference, ...]:
    return tuple(Difference(*row) for row in differing(sealed, here))


def _can_be_established(one: Difference, sealed: Launch, rules: VariableRules) -> bool:
    """Returns whether restoring a capture can establish this condition.

    The root can be established, because it is that of the build. So can the model's name, if the server saw the sandbox's
    link to the model's directory; but a name on the hub is hashed as written. A variable can be set or unset as in the
    build, unless it belongs to the pod.
    """
    if one.name in (_ROOT, _MODEL):
        return one.name == _ROOT or sealed.is_aliased
    variable = rules.hashed.get(one.name.removeprefix("variable."))
    return one.name.startswith("variable.") and variable is not None and not variable.is_of_pod


@dataclass(frozen=True, slots=True)
class CaptureDifference:
    """How capture B differs from capture A.

    Attributes:
        launches: The components and conditions that differ.
        added, removed, changed: Paths of files, sorted. `changed` files have other bytes.
    """

    launches: Comparison
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        launches = self.launches
        return bool(launches.components or launches.unmet or launches.established or self.num_files)

    @property
    def num_files(self) -> int:
        """How many files differ."""
        return len(self.added) + len(self.removed) + len(self.changed)


def capture_difference(old: Bundle, new: Bundle) -> CaptureDifference:
    """Returns the differences between two bundles of captures. Raises SpecError if one holds programs."""
    before, after = _files(old), _files(new)
    rules = server_kind(old.launch.guest).variable_rules
    return CaptureDifference(
        launches=compare(old.launch, new.launch, rules),
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=tuple(sorted(path for path in before.keys() & after.keys() if before[path] != after[path])),
    )


def _files(bundle: Bundle) -> Mapping[str, str]:
    return {file.path: str(file.digest) for file in bundle.require_capture().files}
