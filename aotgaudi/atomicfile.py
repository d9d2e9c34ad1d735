"""Writing a file so that readers see the old bytes or the new ones, never a part, also after a power cut."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from aotgaudi.errors import StoreError


def write_atomic(path: Path, data: bytes | Iterable[bytes], mode: int = 0o644) -> None:
    """Replaces `path` by a file that holds `data`, whole or in pieces, and has exactly the permissions `mode`.

    The bytes go to a temporary file in the same folder, which is flushed and renamed over `path`; then the
    folder is flushed, so that the new name survives a power cut. Of several concurrent writers the last one
    wins. A failed write leaves `path` as it was, and no temporary file.

    Raises:
        StoreError: the file cannot be written (no such folder, no permission, no space).
    """
    try:
        _write_and_rename(path, [data] if isinstance(data, bytes) else data, mode)
        _flush_folder(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write_and_rename(path: Path, pieces: Iterable[bytes], mode: int) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
