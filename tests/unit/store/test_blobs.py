"""Held objects: what was verified is what is read and mapped, whatever the name has come to name."""

from __future__ import annotations

import gc
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError, UntrustedError
from aotgaudi.store.cas import Fault, find_fault, hold_blob, read_blob, read_bounded

DATA = b"verified" * 1000


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(DATA)
    return path


def num_open() -> int:
    gc.collect()  # What other tests have left open goes now, not in between.
    return len(os.listdir("/proc/self/fd"))


def refuse(path: Path, status: os.stat_result) -> None:
    assert stat.S_ISREG(status.st_mode)
    raise UntrustedError(f"{path}: not this one")


def test_a_file_is_examined_before_it_is_read_and_its_descriptor_given_back(blob: Path) -> None:
    before, digest = num_open(), Digest.of(DATA)

    for read in (find_fault, hold_blob, read_blob):
        with pytest.raises(UntrustedError, match="blob: not this one"):
            read(blob, digest, refuse)
    with pytest.raises(UntrustedError, match="blob: not this one"):
        read_bounded(blob, 1 << 20, refuse)
    assert num_open() == before


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("blob"))


@pytest.mark.parametrize(
    ("make", "state"),
    [(Path.mkdir, "corrupt"), (_fifo, "corrupt"), (_link, "corrupt"), (lambda path: None, "missing")],
)
def test_only_regular_files_are_read(blob: Path, make: object, state: str) -> None:
    before, path = num_open(), blob.with_name("other")
    make(path)  # type: ignore[operator]

    for found in (
        read_bounded(path, 10),
        read_blob(path, Digest.of(DATA)),
        hold_blob(path, Digest.of(DATA)),
        find_fault(path, Digest.of(DATA)),
    ):
        assert isinstance(found, Fault)
        assert found.state == state
    assert num_open() == before


def test_a_bounded_read_has_a_bound(blob: Path) -> None:
    assert read_bounded(blob, len(DATA)) == DATA
    assert read_bounded(blob, len(DATA) - 1) == Fault("corrupt", f"has more than {len(DATA) - 1} bytes")


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_descriptors_say_so(limits: tuple[int, int], blob: Path) -> None:
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))

    with pytest.raises(StoreError, match=r"too many open files: raise `ulimit -n`"):
        hold_blob(blob, Digest.of(DATA))
