"""Two launches, component by component: what keeps a capture from being used, and what must be established first.

A capture is for one launch. What differs in the key is refused: with 3 where it is asked for otherwise than it was built (a
flag, a variable, the model), with 5 where this machine is another one (software, instruction sets). What differs in the
conditions is established where it can be, and else named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from aotgaudi.bundle.launch import Launch
from aotgaudi.wrap.launch_machine import satisfies
from aotgaudi.wrap.variables import VariableRules

EXIT_NOT_WARM = 3
EXIT_OTHER_MACHINE = 5

_OF_MACHINE = ("software.", "target.", "guest", "place.")
_ROOT, _MODEL = "place.root", "model.name"
_SHOWN_CHARACTERS = 60
_FEATURES = "target.isa"
_SWITCH = {"true": "on", "false": "off"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A component, or a condition, that is not what it was. None: that side does not have it."""

    name: str
    sealed: str | None
    here: str | None

    @property
    def exit_code(self) -> int:
        """What refusing it exits with."""
        return EXIT_OTHER_MACHINE if self.name.startswith(_OF_MACHINE) else EXIT_NOT_WARM

    @property
    def shown(self) -> tuple[str, str]:
        """What was sealed and what is here, for people; of a list of features those that the other side lacks."""
        if self.name == _FEATURES and self.sealed is not None and self.here is not None:
            sealed, here = self.sealed.split(), self.here.split()
            return _features(sealed, here), _features(here, sealed)
        return plain(self.name, self.sealed), plain(self.name, self.here)

    def __str__(self) -> str:
        """``flag.max-model-len is 1024, the capture was built for 512``."""
        sealed, here = self.shown
        return f"{self.name} is {here}, the capture was built for {sealed}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a launch differs in from the sealed one.

    Attributes:
        components: differences of the key: the capture is of no use here.
        unmet: conditions that cannot be established here: the guest will not take its own files.
        established: conditions that differ, and that whoever restores the capture makes what they were.
    """

    components: tuple[Difference, ...] = ()
    unmet: tuple[Difference, ...] = ()
    established: tuple[Difference, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether the capture can be used."""
        return not self.components and not self.unmet

    @property
    def exit_code(self) -> int:
        """0, or what refusing exits with: 5 if the machine is another one, whatever else differs."""
        return max((one.exit_code for one in (*self.components, *self.unmet)), default=0)

    def sentence(self) -> str:
        """Returns one sentence: the difference that decides, and how many others there are."""
        found = [*self.components, *self.unmet]
        if not found:
            return "the launch is the sealed one"
        first = max(found, key=lambda one: one.exit_code)
        others = f" (and {len(found) - 1} more: aotgaudi explain BUNDLE -- COMMAND)" if len(found) > 1 else ""
        return f"{first}{others}"


def compare(sealed: Launch, here: Launch, rules: VariableRules) -> Comparison:
    """Returns what `here` differs in from `sealed`.

    A CPU that has more features than the capture was built for is no difference. `rules` are the guest's.
    """
    differences = _differences(dict(sealed.components()), dict(here.components()))
    if satisfies(here.target, sealed.target):
        differences = tuple(one for one in differences if not one.name.startswith("target."))
    conditions = _differences(dict(sealed.conditions()), dict(here.conditions()))
    unmet = tuple(one for one in conditions if not _can_be_established(one, sealed, rules))
    established = tuple(one for one in conditions if one not in unmet)
    return Comparison(differences, unmet, established)


def plain(name: str, value: str | None) -> str:
    """Returns a component's value for people: a flag's without the quotes of JSON, all of them short."""
    if value is None:
        return "(default)" if name.startswith("flag.") else "(not there)"
    if name.startswith("flag."):
        value = _SWITCH.get(value) or (json.loads(value) if value.startswith('"') else value)
    text = " ".join(value.split()) or "(none)"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _features(features: Sequence[str], others: Sequence[str]) -> str:
    more = [one for one in features if one not in others]
    return plain(_FEATURES, f"one with {' '.join(more)}" if more else "one with fewer")


def _differences(sealed: dict[str, str], here: dict[str, str]) -> tuple[Difference, ...]:
    names = dict.fromkeys([*sealed, *here])
    return tuple(
        Difference(name, sealed.get(name), here.get(name))
        for name in names
        if sealed.get(name) != here.get(name)
    )


def _can_be_established(one: Difference, sealed: Launch, rules: VariableRules) -> bool:
    """Whether whoever restores a capture can make this condition what it was.

    The root is that of the build. A model that was seen by the alias for its directory is seen by that again, wherever it
    is; a name on the hub is what the guest hashes. A variable that is the pod's own cannot be set as it was in the build;
    any other that changes no code can, or be unset.
    """
    if one.name in (_ROOT, _MODEL):
        return one.name == _ROOT or sealed.is_aliased
    variable = rules.hashed.get(one.name.removeprefix("variable."))
    return one.name.startswith("variable.") and variable is not None and not variable.is_of_pod
