"""How much memory this process may use: of the machine, or less where a control group has a limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.machine import group_folders, lines_of

_UNIFIED = ("memory.max", "memory.current", "inactive_file")
_LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""The files with the limit and with what is used; in memory.stat, the file pages that go when memory is wanted."""


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes. `free_bytes`: what a new process could have, pages of files that can go included."""

    total_bytes: int
    free_bytes: int


def available_memory(root: Path = Path("/")) -> Memory:
    """Returns the least that the machine and each of this process's control groups, of version 1 or 2, allow.

    `root` stands for the file system's root. Zeros where ``/proc/meminfo`` cannot be read.
    """
    machine = _table(root / "proc/meminfo", 1024)
    allowed = [
        Memory(machine.get("MemTotal:", 0), machine.get("MemAvailable:", 0)),
        *_groups(root),
    ]
    return Memory(min(one.total_bytes for one in allowed), min(one.free_bytes for one in allowed))


def _groups(root: Path) -> Iterator[Memory]:
    for folder, is_unified in group_folders("memory", root):
        limit_file, usage_file, reclaimable = _UNIFIED if is_unified else _LEGACY
        limit, used = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None:
            files = _table(folder / "memory.stat").get(reclaimable, 0)
            yield Memory(limit, max(0, limit - max(0, (used or 0) - files)))


def _number(path: Path) -> int | None:
    text = "".join(lines_of(path)[:1]).strip()
    return int(text) if text.isdecimal() else None  # "max": no limit.


def _table(path: Path, unit: int = 1) -> Mapping[str, int]:
    """The lines ``NAME NUMBER ...`` of a file."""
    words = (line.split() for line in lines_of(path))
    return {row[0]: int(row[1]) * unit for row in words if len(row) > 1 and row[1].isdecimal()}
