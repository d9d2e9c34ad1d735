"""A compiler's scratch directory: private, locked while it is used, and swept when its user is dead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aotgaudi.store.scratch import locked_directory, sweep_temporary_files
from aotgaudi.store.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Store.open(tmp_path / "store").root


def test_a_scratch_directory_is_private_and_gone_at_the_end(root: Path) -> None:
    with locked_directory(root) as path:
        (path / "file").write_bytes(b"x")
        assert path.parent == root / "tmp"
        assert path.stat().st_mode & 0o777 == 0o700

    assert list((root / "tmp").iterdir()) == []


def test_a_sweep_leaves_a_scratch_directory_that_is_used_and_takes_one_whose_user_is_dead(root: Path) -> None:
    with locked_directory(root) as used:
        dead = root / "tmp" / "unit-of-the-dead"
        dead.mkdir()
        (dead / "half").write_bytes(b"x")

        assert sweep_temporary_files(root) == 1

        assert used.is_dir()
        assert not dead.exists()


def test_a_scratch_directory_that_was_swept_meanwhile_is_no_error(root: Path) -> None:
    with locked_directory(root) as path:
        shutil.rmtree(path)
