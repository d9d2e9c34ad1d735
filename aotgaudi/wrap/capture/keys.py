"""By what a capture is looked up in a store: the launch's key, and the conditions under which its files were made.

The launch's id is the same wherever it takes place. A capture's files are not: they hold the root, the interpreter's prefix
and the rest of `Launch.conditions`. So a second build elsewhere makes a second capture, and none is taken for the other. But
the path of a model's directory is in no file, for the server sees an alias in its stead: from there nothing is built again.
"""

from __future__ import annotations

from pathlib import Path

from aotgaudi.backends.base import version_of
from aotgaudi.bundle.launch import Launch
from aotgaudi.digest import Key, sha256_source
from aotgaudi.wrap.witness import SITE


def capture_key(launch: Launch) -> Key:
    """Returns the key of the record of a capture that was proved."""
    return Key.of([("record", "aotgaudi.capture/1"), *launch.components(), *_conditions(launch)])


def draft_key(launch: Launch) -> Key:
    """Returns the key of the record of a cold run whose proof has not ended: of this version's witness alone."""
    builder = [(f"builder.{name}", value) for name, value in sorted(builder_versions().items())]
    return Key.of([("record", "aotgaudi.draft/1"), *launch.components(), *_conditions(launch), *builder])


def builder_versions(site: Path = SITE) -> dict[str, str]:
    """Returns what a receipt says of who built it: our version, and the digest of the witness's sources."""
    return {"aotgaudi": version_of("aotgaudi"), "witness": sha256_source(site.rglob("*.py"))}


def _conditions(launch: Launch) -> list[tuple[str, str]]:
    conditions = launch.conditions()
    return [
        (f"condition.{name}", value)
        for name, value in conditions
        if not (name == "model.name" and launch.is_aliased)
    ]
