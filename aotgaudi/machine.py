"""The cores and the memory that this process may use, within the limits of its control groups (cgroups(7)); addresses.

A container that is limited to 2 CPUs on a machine with 64 sees 64 cores. If it ran a thread on each, the kernel would stop
all of them for most of every period.

A matrix product is done when its slowest thread is done. If another process keeps a core busy, a thread on that core holds
up all the others. `choose_threads` therefore leaves busy cores out, and `bound_spinning` keeps waiting threads from burning
cores.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

_MAX_THREADS = 8
_MOUNT = "sys/fs/cgroup"
_MEMBERSHIP = "proc/self/cgroup"

T = TypeVar("T")
R = TypeVar("R")


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yields the folders of this process's control groups for `controller` and of all groups above, each with "is it v2?".

    A yielded folder may not exist. `root` stands for the root of the file system.
    """
    mounts = root / _MOUNT
    for controllers, group in _memberships(root / _MEMBERSHIP):
        if not controllers:
            yield from ((folder, True) for folder in _folders(mounts, group))
        elif controller in controllers:
            for name in dict.fromkeys((",".join(controllers), controller)):
                yield from ((folder, False) for folder in _folders(mounts / name, group))


def lines_of(path: Path) -> list[str]:
    """Returns a file's lines, or no lines if it is missing or unreadable: such a control group sets no limit for us."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _memberships(path: Path) -> Iterator[tuple[list[str], str]]:
    """Yields the controllers (none in version 2) and the path of each group, from lines such as ``4:cpu,cpuacct:/path``."""
    for line in lines_of(path):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        yield [name for name in controllers.split(",") if name], group


def _folders(mount: Path, group: str) -> Iterator[Path]:
    """Yields the group's folder and those above it; only the mount if the path leaves it, as may happen in a container."""
    inner = PurePosixPath(group.lstrip("/"))
    if ".." not in inner.parts:
        yield from (mount / part for part in (inner, *inner.parents))
    else:
        yield mount


def available_cores(root: Path = Path("/")) -> int:
    """Returns the number of usable cores, at least 1: those of the affinity mask, or the smallest quota (rounded down).

    Reads control groups of versions 1 and 2. `root` stands for the root of the file system.
    """
    quotas = [int(quota) for quota in _quotas(root)]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def _quotas(root: Path) -> Iterator[float]:
    """Yields the quotas, in cores, of this process's groups and of all groups above them."""
    for folder, is_unified in group_folders("cpu", root):
        quota = _unified_quota(folder) if is_unified else _legacy_quota(folder)
        if quota is not None:
            yield quota


def _unified_quota(folder: Path) -> float | None:
    """Reads ``cpu.max``, which holds ``QUOTA PERIOD`` in microseconds, or ``max`` as the quota."""
    return _ratio(*(" ".join(lines_of(folder / "cpu.max")).split() or ("max", "1"))[:2])


def _legacy_quota(folder: Path) -> float | None:
    """Reads the two files of version 1. A quota of -1 means no limit."""
    quota, period = (lines_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return _ratio(quota[0], period[0]) if quota and period else None


def _ratio(quota: str, period: str = "100000") -> float | None:
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def in_threads(
    function: Callable[[T], R], values: Iterable[T], begin_thread: Callable[[], object] | None = None
) -> list[R]:
    """Returns the function's result for each value, computed in one thread for each usable core, at most 8.

    After an error, no more calls begin, and it is raised when those that run have ended.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, available_cores()), initializer=begin_thread) as pool:
        return list(pool.map(function, values))


class LateError(Exception):
    """An action has not ended in time."""


def within(seconds: float, action: Callable[[], R]) -> R:
    """Returns the result of `action`, or raises what it raises, or LateError after `seconds`.

    A late thread is abandoned: it is a daemon.
    """
    results: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise LateError
    return results[0]


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the address that `host` is; None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Returns whether `host` (a name or an address) can be reached from this machine only."""
    address = address_of(host)
    if address is None:
        return host.strip("[]").partition("%")[0].rstrip(".").lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# Memory

_UNIFIED = ("memory.max", "memory.current", "inactive_file")
_LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""The files that hold limit and usage, and the line of memory.stat that counts file pages which can be reclaimed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes. `free_bytes` is what a new process could get, including file pages that can be reclaimed."""

    total_bytes: int
    free_bytes: int


def available_memory(root: Path = Path("/")) -> Memory:
    """Returns the smallest figures among the machine and this process's control groups, of version 1 or 2.

    `root` stands for the root of the file system. Returns zeros if ``/proc/meminfo`` cannot be read.
    """
    machine = _table(root / "proc/meminfo", 1024)
    allowed = [
        Memory(machine.get("MemTotal:", 0), machine.get("MemAvailable:", 0)),
        *_groups(root),
    ]
    return Memory(min(one.total_bytes for one in allowed), min(one.free_bytes for one in allowed))


def anonymous_bytes() -> int:
    """Returns the resident bytes of this process that no file backs. See statm in proc(5)."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * resource.getpagesize()


def _groups(root: Path) -> Iterator[Memory]:
    for folder, is_unified in group_folders("memory", root):
        limit_file, usage_file, reclaimable = _UNIFIED if is_unified else _LEGACY
        limit, used = _bytes_in(folder / limit_file), _bytes_in(folder / usage_file)
        if limit is not None:
            files = _table(folder / "memory.stat").get(reclaimable, 0)
            yield Memory(limit, max(0, limit - max(0, (used or 0) - files)))


def _bytes_in(path: Path) -> int | None:
    text = "".join(lines_of(path)[:1]).strip()
    return int(text) if text.isdecimal() else None  # "max" means no limit.


def _table(path: Path, unit: int = 1) -> Mapping[str, int]:
    """Returns the lines ``NAME NUMBER ...`` of a file as a mapping."""
    words = (line.split() for line in lines_of(path))
    return {row[0]: int(row[1]) * unit for row in words if len(row) > 1 and row[1].isdecimal()}


_SAMPLES = 7
_SAMPLE_SECONDS = 0.002
_RUNNING = "procs_running"


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads compute matrix products, and why. Its text is the line for the log."""

    num: int
    why: str

    def __str__(self) -> str:
        return f"matrix products use {self.num} {'thread' if self.num == 1 else 'threads'}: {self.why}"


def choose_threads(environ: Mapping[str, str], children: Iterable[int] = ()) -> Threads:
    """Returns the number of threads: ``OMP_NUM_THREADS``, else one for each free core that we may use.

    Processes with the ids `children` do not count as keeping a core busy.
    """
    given = environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return Threads(int(given), "OMP_NUM_THREADS")
    cores, others = available_cores(), num_running_elsewhere(children)
    free = (os.cpu_count() or cores) - (others or 0)
    if free >= cores:
        return Threads(cores, "one for each core that this process may use")
    busy = f"{others} other {'task keeps' if others == 1 else 'tasks keep'} cores busy"
    return Threads(
        max(1, free), f"{busy}, of {cores} that this process may use (OMP_NUM_THREADS=N overrides)"
    )


def num_running_elsewhere(children: Iterable[int] = (), root: Path = Path("/")) -> int | None:
    """Returns how many tasks run on this machine, without this thread and those of `children`; None if unknown.

    Takes the median over a few milliseconds. Call it while this process runs no other thread.
    """
    folders = [root / "proc" / str(child) / "task" for child in children]
    counts = []
    for _ in range(_SAMPLES):
        rows = (line.split() for line in lines_of(root / "proc/stat"))
        found = next((row[1] for row in rows if len(row) == 2 and row[0] == _RUNNING), "")
        if not found.isdigit():
            return None
        counts.append(int(found) - 1 - sum(map(_num_running, folders)))
        time.sleep(_SAMPLE_SECONDS)
    return max(0, sorted(counts)[len(counts) // 2])


def _num_running(tasks: Path) -> int:
    """Returns how many threads of a process run or wait for a core. `tasks` is its folder ``task`` in ``/proc``."""
    stats = (" ".join(lines_of(task / "stat")) for task in tasks.glob("*"))
    return sum(stat.rpartition(")")[2].split()[:1] == ["R"] for stat in stats)


def bound_spinning(environ: MutableMapping[str, str]) -> None:
    """Bounds how long OpenMP's threads spin for work, unless the user has set it. Call it before libgomp is loaded.

    With the default, a second busy process on the same cores costs hundreds of milliseconds a step. A thousand turns cost
    2 ms of a decode step on an idle machine (docs/benchmarks.md).
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "1000")
