"""What a store holds, in numbers. Reads names and sizes only, but for the roots."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.store.store import Store

KINDS = ("objects", "records", "roots", "index", "quarantine", "tmp", "locks")
"""Directories that are counted by name; everything else is scratch."""


@dataclass(frozen=True)
class Usage:
    """Files and bytes of one kind."""

    num_files: int = 0
    size_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        """Returns both together."""
        return Usage(self.num_files + other.num_files, self.size_bytes + other.size_bytes)


@dataclass(frozen=True)
class StoreUsage:
    """`oldest_use` and `newest_use` are of records, in seconds since the epoch; None without records.

    `index` says in words what state the index is in.
    """

    kinds: dict[str, Usage]
    root_names: tuple[str, ...]
    index: str
    oldest_use: float | None
    newest_use: float | None

    @property
    def total(self) -> Usage:
        """Everything together."""
        return sum(self.kinds.values(), Usage())


def measure_store(store: Store) -> StoreUsage:
    """Counts what is in `store`, without its lower layers. What goes away meanwhile is not counted."""
    kinds = dict.fromkeys((*KINDS, "scratch"), Usage())
    for path in store.root.iterdir():
        kind = path.name if path.name in KINDS else "scratch"
        kinds[kind] += _usage(path)
    stamps = [store.actions.records.stamp(key) for key in store.actions]
    uses = [stamp.used for stamp in stamps if stamp is not None]
    return StoreUsage(
        kinds=kinds,
        root_names=store.roots.names(),
        index=store.describe_index(),
        oldest_use=min(uses, default=None),
        newest_use=max(uses, default=None),
    )


def _usage(path: Path) -> Usage:
    if not path.is_dir() or path.is_symlink():
        return _file_usage(path)
    usage = Usage()
    for parent, _, names in os.walk(path):
        for name in names:
            usage += _file_usage(Path(parent, name))
    return usage


def _file_usage(path: Path) -> Usage:
    with contextlib.suppress(FileNotFoundError):
        return Usage(1, path.lstat().st_size)
    return Usage()
