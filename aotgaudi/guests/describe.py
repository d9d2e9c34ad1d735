"""What is asked for, here and now, as a launch."""

from __future__ import annotations

from aotgaudi.guests.exercise import Exercise, ExerciseLevel, exercise
from aotgaudi.guests.found import Found, public_words
from aotgaudi.guests.identity import compiler_version
from aotgaudi.guests.launch import Launch, Place, world
from aotgaudi.guests.model import identify


def describe(
    found: Found,
    *,
    root: str,
    asked: Exercise | ExerciseLevel = "sampler",
    repairs: tuple[str, ...] | None = None,
    manifest_id: str | None = None,
) -> Launch:
    """Returns the launch of a command.

    Args:
        found: the command.
        root: of its place, as the guest will see it.
        asked: the exercise, or how much of one; a sealed launch's where it is compared with that.
        repairs: ids of those in force; None is all of the guest's.
        manifest_id: of the shapes, if a manifest decides them.

    Raises:
        SpecError: the model's files cannot be read.
        TargetError: there is no device that the guest is for.
    """
    guest, flags = found.guest, found.flags
    rules = guest.variable_rules
    known = tuple(sorted(repair.id for repair in guest.repairs))
    if isinstance(asked, str):
        asked = exercise(asked, flags.room, guest.shape_requests(flags))
    return Launch(
        guest=guest.name,
        words=public_words(found.words, flags, guest),
        flags={name: value for name, value in flags.values.items() if name not in guest.neutral_flags},
        variables=rules.counted(found.environ),
        model=identify(flags.model, found.model),
        software=found.installed.software(compiler_version(found.environ)),
        target=guest.target(found.installed),
        world=world(flags.world),
        place=Place(
            root=root,
            prefix=found.installed.prefix,
            site_packages=found.installed.site_packages,
            variables=rules.conditions(found.environ),
        ),
        exercise=asked,
        repairs=known if repairs is None else repairs,
        manifest_id=manifest_id,
    )
