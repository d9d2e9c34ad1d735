from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.errors import StoreError
from aotgaudi.files import write_atomic


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
