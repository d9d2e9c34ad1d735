"""From a command and the place that it is given to what a session runs: the same in a build and in a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from aotgaudi.bundle.launch import Launch
from aotgaudi.digest import Digest
from aotgaudi.errors import store_error
from aotgaudi.wrap.adapters.base import Phase, PlaceRoot
from aotgaudi.wrap.adapters.found import Found
from aotgaudi.wrap.watch.drive import Address
from aotgaudi.wrap.watch.files import NO_FILES, FileRules
from aotgaudi.wrap.watch.place import Place
from aotgaudi.wrap.watch.session import Plan

OUTSIDE: Mapping[str, str] = {
    "home/*": "a server's home is that of its user again when it serves",
    "tmp/tmp*": "a temporary file of one run",
    "tmp/pymp-*": "what processes of one run shared",
}
"""Patterns of paths below a place's root that are no part of any capture, whatever the guest is; with the reason."""


def plan_for(
    found: Found,
    launch: Launch,
    place: Place,
    phase: Phase,
    *,
    sealed: Mapping[str, Digest] = NO_FILES,
    left_out: Iterable[str] = (),
) -> Plan:
    """Returns what to run in `place` at `phase`.

    Args:
        found: The command.
        launch: What is built, or the sealed launch: its conditions are established, the model's alias and variables.
        place: Where.
        phase: The first one of the run.
        sealed: What lies below the place's root, by path.
        left_out: Patterns of files that may appear there, besides the guest's own.
    """
    guest, root, flags = found.guest, PlaceRoot(str(place.root)), found.flags
    patterns = (*(pattern for pattern, _ in guest.left_out), *OUTSIDE, *left_out)
    environment = guest.environment(root, phase, _established(found, launch)).applied(
        _established(found, launch)
    )
    if any(path.startswith("home/") for path in sealed):
        environment["HOME"] = root.home
    return Plan(
        words=guest.command(found.words, flags, root, is_aliased=launch.is_aliased),
        environment=environment,
        address=Address(
            host=flags.host,
            port=flags.port,
            uds=_seen_from_here(flags.uds, place),
            health_path=guest.health_path(),
            served_name=flags.served_name,
            authorization=flags.authorization,
        ),
        rules=FileRules(place.root, sealed=sealed, left_out=tuple(dict.fromkeys(patterns))),
        repairs=launch.repairs,
    )


def _established(found: Found, launch: Launch) -> dict[str, str]:
    """The command's environment; what the guest hashes of it, and is not the pod's own, is as in the launch."""
    hashed = found.guest.variable_rules.hashed
    ours = {name for name, rule in hashed.items() if not rule.is_of_pod}
    kept = {name: value for name, value in found.environ.items() if name not in ours}
    return {**kept, **{name: value for name, value in launch.place.variables.items() if name in ours}}


def _seen_from_here(uds: str | None, place: Place) -> str | None:
    """A socket below the root lies where we see the place; any other where its name says."""
    prefix = f"{place.root}/"
    return str(place.here / uds[len(prefix) :]) if uds is not None and uds.startswith(prefix) else uds


def link_model(found: Found, launch: Launch, place: Place) -> None:
    """Makes the alias of the model's directory, where `launch` has it seen by that. Raises StoreError."""
    if not launch.is_aliased:
        return
    link = place.folder("model")
    try:
        os.symlink(os.path.abspath(found.model), link)
    except OSError as error:
        raise store_error("make", link, error) from error
