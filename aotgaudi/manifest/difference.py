"""What differs between two manifests, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aotgaudi.manifest.entries import ENTRY_KINDS, Entry
from aotgaudi.manifest.manifest import Manifest

_EXAMPLES = 3
_ABSENT = "(absent)"


def differences(old: Manifest, new: Manifest) -> tuple[str, ...]:
    """Returns a line for each changed value of the spec, and for each kind with entries gained or lost."""
    return (
        *_value_differences("", old.spec.to_json(), new.spec.to_json()),
        *_entry_differences(old, new),
    )


def _value_differences(where: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            place = f"{where}.{name}" if where else name
            yield from _value_differences(place, old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif old != new:
        yield f"{where}: {old} -> {new}"


def _entry_differences(old: Manifest, new: Manifest) -> Iterator[str]:
    for kind in ENTRY_KINDS:
        before, after = old.of_kind(kind), new.of_kind(kind)
        known_before, known_after = set(before), set(after)
        gained = [entry for entry in after if entry not in known_before]
        lost = [entry for entry in before if entry not in known_after]
        if gained or lost:
            yield f"{kind} entries: {_counted('+', gained)}{_counted('-', lost)}".rstrip()
        elif before != after:
            yield f"{kind} entries: in another order"


def _counted(sign: str, entries: list[Entry]) -> str:
    if not entries:
        return ""
    shown = " ".join(map(str, entries[:_EXAMPLES]))
    return f"{sign}{len(entries)} {shown}{' ...' if len(entries) > _EXAMPLES else ''} "
