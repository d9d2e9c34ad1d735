"""Files that somebody else wrote: regular, bounded, and never waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.errors import SpecError, UntrustedError
from aotgaudi.files import read_regular


def test_a_file_is_read_whole_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")

    assert read_regular(tmp_path / "file", 5) == b"12345"
    assert read_regular(tmp_path / "link", 5) == b"12345"


def test_a_file_that_is_larger_than_agreed_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123456")
    with pytest.raises(SpecError, match=r"file: has 6 bytes, at most 5 are read"):
        read_regular(tmp_path / "file", 5)

    os.truncate(tmp_path / "file", 6 << 30)
    with pytest.raises(SpecError, match="has 6442450944 bytes"):
        read_regular(tmp_path / "file", 5)


def _socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "it is a FIFO"),
        (os.mkdir, "it is a directory"),
        (_socket, "No such device or address"),
        (lambda path: os.symlink("/dev/zero", path), "it is a device"),
        (lambda path: os.symlink(path.name, path), "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_refused_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # A socket's name must be short.
    make(tmp_path / "x")

    with pytest.raises(SpecError, match=f"x: cannot be read: {kind}"):
        read_regular(tmp_path / "x", 5)


def test_a_file_that_is_not_there_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 5)
    with pytest.raises(SpecError, match="null"):
        read_regular(tmp_path / "no\0name", 5)


def test_a_file_is_examined_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")

    def refuse(path: Path, status: os.stat_result) -> None:
        raise UntrustedError(f"{path.name} {status.st_size}")

    with pytest.raises(UntrustedError, match="file 5"):
        read_regular(tmp_path / "file", 5, refuse)
