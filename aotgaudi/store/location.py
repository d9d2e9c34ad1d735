"""Finds the default store, and the kind of file system that a path is on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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
