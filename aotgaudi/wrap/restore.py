"""Restores a capture: copies its files from the bundle into a private directory, where a server may load them.

A cache is code, and no server verifies what it loads from its cache. So every file is hashed while it is copied, and the
server sees exactly the bytes that were hashed. No other user may enter the directory (mode 0700, ours). We create every name
in it (O_EXCL), open its path part by part without following links, and make files read-only. Directories stay writable,
because servers put locks there.

The bundle is open. If trusted keys are given, its signature was verified before its receipt was parsed. A receipt's paths
cannot leave the directory (bundle/capture_receipt.py).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.capture_receipt import CapturedFile, ancestry
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, StoreError, UntrustedError, store_error
from aotgaudi.files import Examine, accept_any
from aotgaudi.machine import in_threads
from aotgaudi.store.cas import copy_blob

_FILES_AT_ONCE = 64
"""One task copies at most this many files of a directory, which it opens once."""
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PRIVATE_MODE, _DIRECTORY_MODE = 0o700, 0o755


@dataclass(frozen=True, slots=True)
class Restored:
    """How many files were restored, their bytes, and how long it took."""

    files: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Source:
    """The source of the bytes of captured files.

    Attributes:
        path_of: Returns the file that should have the bytes of a digest.
        name: The source's name in errors.
        remedy: How to repair the source.
        examine: Checks each file before it is read.
    """

    path_of: Callable[[Digest], Path]
    name: str
    remedy: str
    examine: Examine = accept_any


def restore(bundle: Bundle, into: Path) -> Restored:
    """Copies every file of the capture to its path below `into`, hashing it on the way; see `restore_files`.

    Raises SpecError if the bundle holds no capture.
    """
    receipt = bundle.require_capture()
    name, examine = f"bundle {bundle.path}", bundle.policy.examine
    source = Source(bundle.object_path, name, bundle.mending_command, examine)
    return restore_files(receipt.files, source, into)


def restore_files(files: Sequence[CapturedFile], source: Source, into: Path) -> Restored:
    """Copies each file to its path below `into`, hashing it on the way. The paths are those of a receipt.

    `into` must be our directory with mode 0700, or have such a folder for each path. Directories may exist there, but none
    of the files. Files get mode 0444 (0555 if they were executable), and new directories 0755. On an error, everything made
    here is removed.

    Raises:
        UntrustedError: Other users may enter `into`, or `source` refuses a file.
        CorruptError: A file is missing or is not what was sealed. Names its path and digest.
        StoreError: A name exists already, or the system refuses: there is no room, say.
    """
    started = time.monotonic()
    try:
        descriptor = os.open(into, _DIRECTORY_FLAGS)
    except OSError as error:
        raise store_error("restore into", into, error) from error
    try:
        _require_private(into, descriptor, files)
        tree = _Tree(into, descriptor)
        try:
            _restore(files, source, tree)
        except BaseException:
            tree.undo()
            raise
    finally:
        os.close(descriptor)
    num_bytes = sum(file.digest.size_bytes for file in files)
    return Restored(len(files), num_bytes, time.monotonic() - started)


def _require_private(into: Path, descriptor: int, files: Iterable[CapturedFile]) -> None:
    """Requires that `into` is ours alone, or that each folder in it that gets files is."""
    status = os.fstat(descriptor)
    tops = {file.path.partition("/")[0] for file in files}
    if _is_private(status) or (tops and all(_has_private(descriptor, name) for name in tops)):
        return
    mode = stat.S_IMODE(status.st_mode)
    raise UntrustedError(
        f"{into} belongs to uid {status.st_uid} and has mode {mode:04o}: others may put code there"
        f" (it, or each folder in it, must belong to uid {os.geteuid()} and have mode {_PRIVATE_MODE:04o})"
    )


def _has_private(descriptor: int, name: str) -> bool:
    try:
        return _is_private(os.stat(name, dir_fd=descriptor, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_private(status: os.stat_result) -> bool:
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_ours and stat.S_IMODE(status.st_mode) == _PRIVATE_MODE


def _restore(files: Iterable[CapturedFile], source: Source, tree: _Tree) -> None:
    folders: dict[str, list[CapturedFile]] = {}
    for file in files:
        folders.setdefault(posixpath.dirname(file.path), []).append(file)
    for path in sorted({name for folder in folders for name in ancestry(folder)}):
        tree.make_directory(path)
    jobs = [
        (folder, inside[start : start + _FILES_AT_ONCE])
        for folder, inside in folders.items()
        for start in range(0, len(inside), _FILES_AT_ONCE)
    ]
    in_threads(lambda job: _restore_folder(*job, source, tree), jobs)


def _restore_folder(folder: str, files: Sequence[CapturedFile], source: Source, tree: _Tree) -> None:
    with tree.open_directory(folder) as parent:
        for file in files:
            with tree.new_file(file.path, parent) as target:
                fault = copy_blob(source.path_of(file.digest), file.digest, target, source.examine)
                if fault is not None:
                    raise CorruptError(
                        f"{file.path} of {source.name} is not what was sealed: {file.digest}: {fault.reason}"
                        f" ({source.remedy})"
                    )
                os.fchmod(target, file.mode_bits)


class _Tree:
    """Makes files and directories below an open directory, and can remove them again. Opens a path part by part.

    Raises StoreError. Thread-safe, except for `undo`.
    """

    def __init__(self, root: Path, descriptor: int) -> None:
        self._root, self._descriptor = root, descriptor
        self._files: list[str] = []
        self._directories: list[str] = []

    def make_directory(self, path: str) -> None:
        """Makes a directory unless it exists."""
        parent, name = posixpath.split(path)
        with self.open_directory(parent) as descriptor, self._explained(path):
            try:
                os.mkdir(name, _PRIVATE_MODE, dir_fd=descriptor)
            except FileExistsError:
                return  # Opening it fails if it is not a directory.
            self._directories.append(path)
            os.chmod(name, _DIRECTORY_MODE, dir_fd=descriptor)

    @contextlib.contextmanager
    def open_directory(self, path: str) -> Iterator[int]:
        """Yields the open directory at `path` ("" for the root)."""
        found = os.dup(self._descriptor)
        try:
            for name in filter(None, path.split("/")):
                with self._explained(path):
                    outer, found = found, os.open(name, _DIRECTORY_FLAGS, dir_fd=found)
                os.close(outer)
            yield found
        finally:
            os.close(found)

    @contextlib.contextmanager
    def new_file(self, path: str, parent: int) -> Iterator[int]:
        """Yields a new file at `path`, open for writing. `parent` is its open directory."""
        with self._explained(path):
            descriptor = os.open(posixpath.basename(path), _FILE_FLAGS, 0o600, dir_fd=parent)
        self._files.append(path)
        try:
            with self._explained(path):
                yield descriptor
        finally:
            os.close(descriptor)

    def undo(self) -> None:
        """Removes what was made. Never fails: what cannot be removed stays in our private directory."""
        for path in self._files:
            with contextlib.suppress(OSError):
                os.unlink(path, dir_fd=self._descriptor)
        for path in reversed(self._directories):
            with contextlib.suppress(OSError):
                os.rmdir(path, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise StoreError(
                f"cannot restore {path} into {self._root}: the name is taken (empty that directory)"
            ) from error
        except OSError as error:
            raise store_error("restore", self._root / path, error) from error
