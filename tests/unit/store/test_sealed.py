"""Sealed objects: what was hashed is what is read and mapped, whatever becomes of the file."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError, UntrustedError
from aotgaudi.store.cas import Fault, find_fault, hold_blob, read_blob, read_bounded
from aotgaudi.store.memfd import SealedObjects, allow_open_files

DATA = b"verified" * 1000


@pytest.fixture
def held() -> Iterator[SealedObjects]:
    objects = SealedObjects()
    yield objects
    objects.close()


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(DATA)
    return path


def num_open() -> int:
    gc.collect()  # What other tests have left open goes now, not in between.
    return len(os.listdir("/proc/self/fd"))


def test_a_sound_object_is_held(held: SealedObjects, blob: Path) -> None:
    digest = Digest.of(DATA)

    assert held.hold(blob, digest) is None

    assert len(held) == 1
    assert held.read(digest) == held.read(digest) == DATA
    assert held.path(digest).read_bytes() == DATA
    assert os.path.realpath(held.path(digest).parent) == f"/proc/{os.getpid()}/fd"


def in_place(data: bytes, size_bytes: int | None = None) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(data)
            file.truncate(size_bytes)

    return change


CHANGES: dict[str, Callable[[Path], object]] = {
    "renamed over": lambda path: path.with_name("evil").rename(path),
    "removed": Path.unlink,
    "a link": lambda path: (path.unlink(), path.symlink_to(path.with_name("evil"))),
    "overwritten": in_place(b"\xcc" * len(DATA)),
    "truncated": in_place(b"", 0),
    "zeroed": in_place(bytes(len(DATA))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_file_or_its_name_changes_nothing(
    held: SealedObjects, blob: Path, change: Callable[[Path], object]
) -> None:
    digest = Digest.of(DATA)
    held.hold(blob, digest)
    blob.with_name("evil").write_bytes(b"evil")

    change(blob)

    assert held.read(digest) == DATA
    assert held.path(digest).read_bytes() == DATA


def test_nobody_can_write_to_a_sealed_object_not_even_we(held: SealedObjects, blob: Path) -> None:
    held.hold(blob, Digest.of(DATA))
    path = held.path(Digest.of(DATA))

    with path.open("r+b", buffering=0) as file:
        for change in (
            lambda: file.write(b"x"),
            lambda: file.truncate(10),
            lambda: file.truncate(len(DATA) + 1),
            lambda: mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_WRITE),
            lambda: fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(OSError, match="Operation not permitted"):
                change()
    assert held.read(Digest.of(DATA)) == DATA


def test_libraries_are_mapped_from_sealed_memory_and_told_apart(tmp_path: Path) -> None:
    """One after the other under one number of a descriptor: each is what was hashed under its digest."""
    libraries = [path for path in mapped_files() if path.startswith("/") and ".so" in path][:3]
    numbers, handles = set(), []
    for number, library in enumerate(libraries):
        held, path = SealedObjects(), tmp_path / f"unit{number}.so"
        shutil.copy(library, path)
        digest = Digest.of(path.read_bytes())
        held.hold(path, digest)
        with path.open("r+b") as file:
            file.write(b"\xcc" * digest.size_bytes)
        numbers.add(held.path(digest).name)
        handles.append(ctypes.CDLL(str(held.path(digest)))._handle)
        held.close()

    assert len(numbers) == 1
    assert len(set(handles)) == len(libraries)
    assert {f"/memfd:unit{number}.so (deleted)" for number in range(3)} <= set(mapped_files())


def mapped_files() -> list[str]:
    """What this process has mapped, by name."""
    rows = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({row[5] for row in rows if len(row) > 5})


def test_what_is_not_sound_is_not_held(held: SealedObjects, blob: Path) -> None:
    before = num_open()

    assert held.hold(blob, Digest.of(b"x" * len(DATA))) == Fault(
        "corrupt",
        f"sha256 is {Digest.of(DATA).sha256[:12]}..., should be {Digest.of(b'x' * len(DATA)).sha256[:12]}...",
    )
    assert held.hold(blob, Digest.of(b"short")) == Fault("corrupt", "has 8000 bytes, should have 5")
    assert held.hold(blob.with_name("none"), Digest.of(DATA)) == Fault("missing", "no such file")
    assert (len(held), num_open()) == (0, before)
    with pytest.raises(KeyError):
        held.path(Digest.of(DATA))


def test_one_object_is_held_once_by_many_threads(held: SealedObjects, blob: Path) -> None:
    before = num_open()
    barrier = threading.Barrier(8)

    def hold(_: int) -> Fault | None:
        barrier.wait()
        return held.hold(blob, Digest.of(DATA))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(hold, range(8))) == [None] * 8

    assert (len(held), num_open()) == (1, before + 1)


def test_closing_gives_every_descriptor_back(blob: Path) -> None:
    before, objects = num_open(), SealedObjects()
    objects.hold(blob, Digest.of(DATA))

    objects.close()

    assert (len(objects), num_open()) == (0, before)


def test_a_descriptor_is_for_us_alone(held: SealedObjects, blob: Path) -> None:
    held.hold(blob, Digest.of(DATA))

    assert not os.get_inheritable(int(held.path(Digest.of(DATA)).name))


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_of_open_files_is_raised_by_what_is_held(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))

    allow_open_files(1000)

    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1256, limits[1])


@pytest.mark.process
def test_a_hard_limit_that_is_too_low_is_named_with_what_would_do() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 300));"
        "from aotgaudi.store.memfd import allow_open_files;"
        "allow_open_files(100); print(resource.getrlimit(resource.RLIMIT_NOFILE)); allow_open_files(400)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout.strip() == "(228, 300)"
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"{StoreError.__module__}.StoreError: 400 objects are open at once")
    assert "this process may open 300 files (raise the hard limit to 4" in message


# Reading and holding a file, of which the name may come to name another


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


def test_too_few_descriptors_say_so(limits: tuple[int, int], blob: Path) -> None:
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))

    with pytest.raises(StoreError, match=r"too many open files: raise `ulimit -n`"):
        hold_blob(blob, Digest.of(DATA))
