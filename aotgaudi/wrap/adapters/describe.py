"""What is asked for, here and now, as a launch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from aotgaudi.bundle.launch import Launch, Place, WarmUp, WarmUpLevel, warm_up, world
from aotgaudi.wrap.adapters.asking import Asking
from aotgaudi.wrap.adapters.found import Found, find_guest, guest_named, public_words
from aotgaudi.wrap.adapters.identity import compiler_version
from aotgaudi.wrap.adapters.model import identify
from aotgaudi.wrap.adapters.shapes import as_sealed


def describe(
    found: Found,
    *,
    root: str,
    asked: WarmUp | WarmUpLevel = "sampler",
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
        asked = warm_up(asked, flags.room, guest.shape_requests(flags))
    return Launch(
        guest=guest.name,
        words=public_words(found.words, flags, guest),
        flags={name: value for name, value in flags.values.items() if name not in guest.neutral_flags},
        variables=rules.counted(found.environ),
        model=identify(os.path.abspath(found.model) if found.is_local else flags.model, found.model),
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


def describe_here(
    sealed: Launch,
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    root: str | None = None,
    asking: Asking | None = None,
) -> tuple[Found, Launch]:
    """Returns what a command starts here, and its launch, asked as the sealed one was: to be compared with that.

    Args:
        sealed: the launch of a capture.
        words: the command; none means the sealed one.
        environ: the environment that it would be started in.
        root: of its place; None is the sealed one.
        asking: the command's interpreter, if it has been asked already.

    Raises:
        SpecError: it starts no server that we know, or its model is not there.
        TargetError: its interpreter, or the device, is not there.
    """
    words, environ = as_sealed(guest_named(sealed.guest), sealed, words or sealed.words, environ)
    found = find_guest(words, environ, asking=asking)
    return found, describe(
        found,
        root=sealed.place.root if root is None else root,
        asked=sealed.exercise,
        repairs=sealed.repairs,
        manifest_id=sealed.manifest_id,
    )
