"""Reading files that somebody else wrote: regular ones only, never more than was agreed, and without waiting.

A FIFO does not block the reader, a device is not acted on, and a sparse file of terabytes costs one ``fstat``. Links are
followed: whoever may write a link into a directory may write a file into it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aotgaudi.errors import SpecError

Examine = Callable[[Path, os.stat_result], None]
"""Looks at a regular file that has been opened, before it is read; raises where it must not be."""

MAX_DOCUMENT_BYTES = 256 << 20
"""The most that is read of a document of ours: a manifest, a receipt, an index."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a symbolic link"),
)


def accept_any(path: Path, status: os.stat_result) -> None:
    """Examines nothing."""


def kind_of(mode: int) -> str:
    """Returns what a file that is not a regular one is, for people."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


@contextmanager
def open_regular(path: Path, examine: Examine = accept_any) -> Iterator[io.FileIO]:
    """Opens a regular file for reading.

    Raises:
        SpecError: it is something else, or cannot be opened.
        FileNotFoundError: nothing has this name.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # A ValueError: a path with a zero byte.
        raise SpecError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SpecError(str(path), f"cannot be read: it is {kind_of(status.st_mode)}", "a regular file")
        examine(path, status)
        yield io.FileIO(descriptor, "rb", closefd=False)
    finally:
        os.close(descriptor)


def read_regular(path: Path, max_bytes: int, examine: Examine = accept_any) -> bytes:
    """Returns a regular file's bytes, of which there may be `max_bytes`. Raises as `open_regular`, and SpecError."""
    with open_regular(path, examine) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        data = b"" if size_bytes > max_bytes else _read(file, path, max_bytes + 1)
        if max(size_bytes, len(data)) > max_bytes:
            raise SpecError(
                str(path), f"has {max(size_bytes, len(data))} bytes, at most {max_bytes} are read"
            )
        return data


def _read(file: io.FileIO, path: Path, max_bytes: int) -> bytes:
    try:
        return io.BufferedReader(file).read(max_bytes)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from error
