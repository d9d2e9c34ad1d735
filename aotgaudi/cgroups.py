"""The control groups of this process: where their files are, in versions 1 and 2 (cgroups(7))."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNT = "sys/fs/cgroup"
_MEMBERSHIP = "proc/self/cgroup"


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yields the folders of this process's groups for `controller` and of all groups above them, and whether of version 2.

    They need not be there. `root` stands for the file system's root.
    """
    mounts = root / _MOUNT
    for controllers, group in _memberships(root / _MEMBERSHIP):
        if not controllers:
            yield from ((folder, True) for folder in _folders(mounts, group))
        elif controller in controllers:
            for name in dict.fromkeys((",".join(controllers), controller)):
                yield from ((folder, False) for folder in _folders(mounts / name, group))


def lines_of(path: Path) -> list[str]:
    """Returns a file's lines; none where it is missing or unreadable: such a group sets no limit for us."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _memberships(path: Path) -> Iterator[tuple[list[str], str]]:
    """The controllers (none in version 2) and the path of each group, from lines such as ``4:cpu,cpuacct:/path``."""
    for line in lines_of(path):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        yield [name for name in controllers.split(",") if name], group


def _folders(mount: Path, group: str) -> Iterator[Path]:
    """The group's folder and those above it. Inside a container the path may be the host's: then only the mount is there."""
    inner = PurePosixPath(group.lstrip("/"))
    if ".." not in inner.parts:
        yield from (mount / part for part in (inner, *inner.parents))
    else:
        yield mount
