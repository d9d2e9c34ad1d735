"""What ``aotgaudi diff`` says of two bundles of wrapped servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.cli.explain_launch import difference_rows, difference_table
from aotgaudi.cli.show import counted
from aotgaudi.wrap.explain import CaptureDifference, capture_difference

_SHOWN_FILES = 10


def diff_captures(old: Path, new: Path) -> tuple[dict[str, Any], list[str], bool]:
    """Returns what differs, as a JSON value and in lines for people, and whether anything does.

    Raises what opening a bundle raises, and SpecError where one of them is no capture.
    """
    before, after = open_bundle(old), open_bundle(new)
    found = capture_difference(before, after)
    document = {
        "a": {"path": str(old), "launch": before.launch.id},
        "b": {"path": str(new), "launch": after.launch.id},
        "different": bool(found),
        "components": difference_rows(found.launches.components),
        "conditions": difference_rows([*found.launches.unmet, *found.launches.established]),
        "files": {"added": found.added, "removed": found.removed, "changed": found.changed},
    }
    return document, list(_lines(found)) if found else ["no difference"], bool(found)


def _lines(found: CaptureDifference) -> Iterator[str]:
    conditions = (*found.launches.unmet, *found.launches.established)
    for title, differences in (("launch", found.launches.components), ("conditions", conditions)):
        if differences:
            yield f"{title}:"
            yield from difference_table(differences, ("A", "B"))
    if not found.num_files:
        return
    yield "files:"
    for verb, paths in (("added", found.added), ("removed", found.removed), ("changed", found.changed)):
        if paths:
            yield f"    {counted(len(paths), 'file')} {verb}"
            yield from (f"        {path}" for path in paths[:_SHOWN_FILES])
            if len(paths) > _SHOWN_FILES:
                yield f"        and {len(paths) - _SHOWN_FILES} more (--json)"
