"""Which components differ: one comparison for keys, launches, environments and what a server hashed."""

from __future__ import annotations

from collections.abc import Mapping

from aotgaudi.digest import Key


def differing(
    old: Mapping[str, str], new: Mapping[str, str]
) -> tuple[tuple[str, str | None, str | None], ...]:
    """Returns ``(name, old, new)`` of every component that differs, in the order of `old`; None where a side lacks it."""
    return Key(tuple(old.items())).differences(Key(tuple(new.items())))
