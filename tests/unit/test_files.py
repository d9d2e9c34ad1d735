from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.errors import SpecError, StoreError, UntrustedError
from aotgaudi.files import (
    NotRegularError,
    lock_directory,
    make_locked_directory,
    open_descriptor,
    read_regular,
    write_atomic,
)


def test_write_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    write_atomic(path, b"new")

    assert path.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o755])
def test_mode_is_exact_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "file", b"", mode)
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_reader_that_has_the_old_file_open_keeps_the_old_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    with path.open("rb") as reader:
        write_atomic(path, b"new")
        assert reader.read() == b"old"


def test_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "file"

    with pytest.raises(StoreError) as caught:
        write_atomic(path, b"")

    assert str(caught.value) == f"{path}: cannot be written: No such file or directory"


def test_failed_rename_keeps_the_target_and_removes_the_temporary_file(tmp_path: Path) -> None:
    """A folder of that name cannot be replaced by a file."""
    (tmp_path / "taken" / "inside").mkdir(parents=True)

    with pytest.raises(StoreError, match="cannot be written"):
        write_atomic(tmp_path / "taken", b"new")

    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken" / "inside").is_dir()


def test_pieces_are_written_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "file"

    write_atomic(path, iter([b"one ", b"", b"two"]))

    assert path.read_bytes() == b"one two"


def test_pieces_that_fail_to_come_leave_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("no more")

    path = tmp_path / "file"
    path.write_bytes(b"old")

    with pytest.raises(ValueError, match="no more"):
        write_atomic(path, pieces())

    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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
        (_socket, "it is a socket or a device"),
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


def test_a_descriptor_is_opened_for_no_link_and_examined_before_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("file")

    def refuse(path: Path, status: os.stat_result) -> None:
        raise UntrustedError(f"{path} of {status.st_size}")

    with pytest.raises(NotRegularError, match="not a regular file: a symbolic link"):
        open_descriptor(tmp_path / "link")
    with pytest.raises(UntrustedError, match="file of 1"):
        open_descriptor(tmp_path / "file", examine=refuse)
    os.close(open_descriptor(tmp_path / "link", follow=True))


@pytest.mark.parametrize("call", ["open", "flock"], ids=["before it is opened", "before it is locked"])
def test_a_directory_that_a_sweeper_finds_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    module: Any = fcntl if call == "flock" else os
    real = getattr(module, call)

    def late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        for path in tmp_path.iterdir():
            path.rmdir()
        return real(*arguments, **options)

    monkeypatch.setattr(module, call, late)
    path, descriptor = make_locked_directory(tmp_path, "x-")

    assert list(tmp_path.iterdir()) == [path]
    with lock_directory(path) as is_free:
        assert is_free is False
    os.close(descriptor)
    with lock_directory(path) as is_free:
        assert is_free
