"""How many cores this process may use: its affinity, and the CPU quotas of its control groups.

A container that is limited to 2 CPUs on a machine with 64 sees 64 cores. With a thread on each, the kernel stops all of
them for most of every period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from aotgaudi.cgroups import group_folders, lines_of


def available_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores, at least 1: of the affinity, or fewer where a quota is smaller (rounded down).

    Control groups of version 1 and 2 are read; `root` stands for the file system's root.
    """
    quotas = [int(quota) for quota in _quotas(root)]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in cores, of this process's groups and of all groups above them."""
    for folder, is_unified in group_folders("cpu", root):
        quota = _unified_quota(folder) if is_unified else _legacy_quota(folder)
        if quota is not None:
            yield quota


def _unified_quota(folder: Path) -> float | None:
    """``cpu.max`` holds ``QUOTA PERIOD`` in microseconds; the quota may be ``max``."""
    return _ratio(*(" ".join(lines_of(folder / "cpu.max")).split() or ("max", "1"))[:2])


def _legacy_quota(folder: Path) -> float | None:
    """A quota of -1 means no limit."""
    quota, period = (lines_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return _ratio(quota[0], period[0]) if quota and period else None


def _ratio(quota: str, period: str = "100000") -> float | None:
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)
