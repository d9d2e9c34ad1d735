"""Finds the default store, and checks what a store lies on and who may have written to it.

Anybody who can write to a store decides what code runs from the bundles made with it. So a store's directory must belong to
us or to root, and must not be writable or replaceable by everybody. A group may write to it, since users who share a store
trust that group.

A volume of root's is an exception for other users: something is mounted there, and everybody may write to it. A pod's
``emptyDir`` is like that (mode 0777, with fsGroup 2777). Nobody but the pod sees it, and only root can change its mode.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from aotgaudi.errors import StoreError, store_errors

_MOUNTS = Path("/proc/self/mountinfo")

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p",
        "afs",
        "ceph",
        "cifs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
        "virtiofs",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
    }
)
"""File systems that several hosts can mount, by their types in /proc/self/mountinfo."""


def default_store_root() -> Path:
    """Returns ``$XDG_CACHE_HOME/aotgaudi`` or ``~/.cache/aotgaudi``, or a directory for this uid if it has no home.

    A container may run as a uid without an entry in the password file. Then it has no $HOME, or ``/``, which is root's.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache:
        return Path(cache) / "aotgaudi"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    if home != Path("/"):
        return home / ".cache" / "aotgaudi"
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - not probed (it may be read-only); owner checked
    return Path(temporary) / f"aotgaudi-{os.geteuid()}"


def file_system(path: Path, mounts: Path = _MOUNTS) -> str:
    """Returns the type of the file system that `path` is or would be on (``ext4``); empty if it is unknown."""
    place = str(path.resolve())
    best, found = "", ""
    for mount_point, kind in _mount_points(mounts):
        inside = place == mount_point or place.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, found = mount_point, kind
    return found


def is_mount_point(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Returns whether something is mounted at `path`, a bind mount of the same file system included."""
    return os.path.ismount(path) or str(path) in {place for place, _ in _mount_points(mounts)}


def _mount_points(mounts: Path) -> Iterator[tuple[str, str]]:
    """Yields mount points and file system types, in the order of mounting (proc(5), mountinfo)."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if separator and len(fields) > 4:
            yield _unescaped(fields[4]), after.split(" ")[0]


def _unescaped(text: str) -> str:
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


_CHECKED = ("", "objects", "objects/sha256", "records", "roots")


def refuse_unsafe(root: Path) -> None:
    """Raises StoreError if others than root, us and our groups could have written to the store at `root`."""
    with store_errors("look at", root):
        resolved = root.resolve(strict=True)
        for path in (resolved / name for name in _CHECKED):
            if path.exists():
                _refuse_directory(root, path)
        parent = replaceable_in(root)
    if parent is not None:
        raise StoreError(
            f"store at {root}: everybody may replace it, for everybody may write to {parent}"
            f" (chmod o-w {parent}, or +t, or trust them: --allow-unsafe-store)"
        )


def belongs_to_root(path: Path, status: os.stat_result) -> bool:
    """Returns whether the directory is root's and we are not root. Root can put anything anywhere, so it is no threat."""
    return status.st_uid == 0 and os.geteuid() != 0


def is_volume(path: Path, status: os.stat_result) -> bool:
    """Returns whether the directory is root's, we are not root, and something is mounted there."""
    return belongs_to_root(path, status) and is_mount_point(path)


def replaceable_in(path: Path, accepted: Callable[[Path, os.stat_result], bool] = is_volume) -> Path | None:
    """Returns the nearest directory above `path` in which any user could replace it; None if there is none.

    In a sticky directory, only the owner can. Links are followed. `accepted` directories do not count. Raises OSError.
    """
    for parent in path.resolve(strict=True).parents:
        status = parent.stat()
        if (
            status.st_mode & stat.S_IWOTH
            and not status.st_mode & stat.S_ISVTX
            and not accepted(parent, status)
        ):
            return parent
    return None


def _refuse_directory(root: Path, path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"store at {root}: {path} is not a directory")
    if status.st_uid not in (0, os.geteuid()):
        raise StoreError(
            f"store at {root}: {path} belongs to uid {status.st_uid}, who could have put anything there"
            f" (chown it to uid {os.geteuid()}, or trust them: --allow-unsafe-store)"
        )
    if status.st_mode & stat.S_IWOTH and not is_volume(path, status):
        raise StoreError(
            f"store at {root}: everybody may write to {path}, so anybody may have put code there"
            f" (chmod o-w {path}, or trust them: --allow-unsafe-store)"
        )
