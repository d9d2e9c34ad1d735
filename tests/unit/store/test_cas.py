"""The object store: whole or absent, verified on reading, mended by putting."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.store.cas import ObjectStore, object_path
from tests.unit.failing import raising

DATA = bytes(range(256)) * 40


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "store")


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def leftovers(objects: ObjectStore) -> list[str]:
    return [path.name for path in (objects.root / "tmp").iterdir()]


def test_put_bytes_stores_under_the_digest_read_only(objects: ObjectStore) -> None:
    digest = objects.put_bytes(DATA)

    path = objects.root / "objects" / "sha256" / digest.sha256[:2] / digest.sha256
    assert digest == Digest.of(DATA)
    assert objects.path(digest) == path
    assert path.read_bytes() == DATA
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert leftovers(objects) == []


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_put_file_equals_put_bytes(objects: ObjectStore, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(data)

    digest = objects.put_file(source)

    assert digest == Digest.of(data)
    assert objects.read(digest) == data
    assert leftovers(objects) == []


def test_the_mode_does_not_depend_on_the_umask(objects: ObjectStore) -> None:
    previous = os.umask(0o077)
    try:
        digest = objects.put_bytes(DATA)
    finally:
        os.umask(previous)

    assert stat.S_IMODE(objects.path(digest).stat().st_mode) == 0o444


def test_putting_again_keeps_the_intact_object(objects: ObjectStore, tmp_path: Path) -> None:
    digest = objects.put_bytes(DATA)
    inode = objects.path(digest).stat().st_ino
    source = tmp_path / "source"
    source.write_bytes(DATA)

    objects.put_bytes(DATA)
    objects.put_file(source)

    assert objects.path(digest).stat().st_ino == inode
    assert leftovers(objects) == []


@pytest.mark.parametrize("bad", [DATA[:-1] + b"!", DATA[:-1], b"", DATA + b"x"])
@pytest.mark.parametrize("as_file", [False, True])
def test_putting_again_mends_a_damaged_object(
    objects: ObjectStore, tmp_path: Path, bad: bytes, as_file: bool
) -> None:
    digest = objects.put_bytes(DATA)
    overwrite(object_path(objects.root, digest), bad)
    source = tmp_path / "source"
    source.write_bytes(DATA)

    objects.put_file(source) if as_file else objects.put_bytes(DATA)

    assert objects.read(digest) == DATA


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"\x01" + DATA[1:], id="bit flip at the start"),
        pytest.param(DATA[:5000] + b"\x00" + DATA[5001:], id="byte in the middle"),
        pytest.param(b"", id="truncated to nothing"),
        pytest.param(DATA[: len(DATA) // 2], id="truncated to half"),
        pytest.param(DATA[:-1], id="truncated by one"),
        pytest.param(DATA + b"\x00", id="one byte appended"),
    ],
)
def test_damage_is_never_read(objects: ObjectStore, bad: bytes) -> None:
    digest = objects.put_bytes(DATA)
    overwrite(object_path(objects.root, digest), bad)

    for look in (objects.read, objects.verify):
        with pytest.raises(CorruptError, match=str(digest)):
            look(digest)


def test_swapped_objects_are_both_corrupt(objects: ObjectStore) -> None:
    one, two = objects.put_bytes(b"one"), objects.put_bytes(b"two")
    first, second = objects.path(one), objects.path(two)
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)

    for digest in (one, two):
        assert objects.has(digest), "has() compares only sizes"
        with pytest.raises(CorruptError, match="sha256 is"):
            objects.read(digest)


def _symlink(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_bytes(DATA)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("replace", "reason"),
    [(_symlink, "symbolic link"), (os.mkfifo, "FIFO"), (Path.mkdir, "directory")],
    ids=["symlink", "fifo", "directory"],
)
def test_anything_but_a_regular_file_is_refused(objects: ObjectStore, replace: object, reason: str) -> None:
    """A link to the right bytes is refused too, and a FIFO does not block."""
    digest = objects.put_bytes(DATA)
    path = objects.path(digest)
    path.unlink()
    replace(path)  # type: ignore[operator]

    assert not objects.has(digest)
    for look in (objects.read, objects.verify, objects.path):
        with pytest.raises(CorruptError, match=reason):
            look(digest)


def test_an_absent_object_is_named(objects: ObjectStore) -> None:
    digest = Digest.of(b"never stored")

    assert not objects.has(digest)
    for look in (objects.read, objects.verify, objects.path):
        with pytest.raises(StoreError, match=f"{digest} is not in the store"):
            look(digest)


def test_a_truncated_object_is_not_there_cheaply(objects: ObjectStore) -> None:
    digest = objects.put_bytes(DATA)
    overwrite(object_path(objects.root, digest), DATA[:-1])

    assert not objects.has(digest)
    with pytest.raises(CorruptError, match=f"has {len(DATA) - 1} bytes, should have {len(DATA)}"):
        objects.path(digest)


@pytest.mark.parametrize("call", ["fsync", "rename", "fchmod"])
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, ["No space left", f"{len(DATA)} bytes are needed"]),
        (errno.EACCES, ["Permission denied", "make it accessible to uid"]),
        (errno.EROFS, ["Read-only file system", "remount"]),
        (errno.EIO, ["Input/output error", "check it"]),
    ],
)
def test_a_refused_write_leaves_nothing(
    objects: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    words: list[str],
) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)

    monkeypatch.setattr(os, call, raising(code))
    for as_file in (False, True):
        with pytest.raises(StoreError) as caught:
            objects.put_file(source) if as_file else objects.put_bytes(DATA)
        message = str(caught.value)
        assert str(objects.root) in message
        assert "\n" not in message
        assert all(word in message for word in words)
    monkeypatch.undo()

    assert not objects.has(Digest.of(DATA))
    assert leftovers(objects) == []


_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from aotgaudi.errors import StoreError
from aotgaudi.store.cas import ObjectStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    ObjectStore(Path(sys.argv[1])).put_bytes(bytes(3_000_000))
except StoreError as error:
    print(error)
"""


@pytest.mark.process
def test_a_write_that_the_kernel_cuts_short_leaves_nothing(objects: ObjectStore) -> None:
    """A real write(2) that stops half-way (RLIMIT_FSIZE), which works for root too."""
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(objects.root)], capture_output=True, text=True, check=True
    )

    assert "File too large (3000000 bytes are needed" in done.stdout
    assert leftovers(objects) == []
    assert list(objects.digests()) == []


def test_a_source_that_is_no_file_is_named(objects: ObjectStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(StoreError, match=r"cannot read .*nothing: No such file"):
        objects.put_file(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"fifo: not a regular file"):
        objects.put_file(tmp_path / "fifo")
    with pytest.raises(StoreError, match="directory"):
        objects.put_file(tmp_path)


def test_listing_passes_over_foreign_files(objects: ObjectStore) -> None:
    digest = objects.put_bytes(DATA)
    (objects.path(digest).parent / "lost.tmp").write_bytes(b"")
    (objects.root / "objects" / "sha256" / "README").write_bytes(b"")

    assert list(objects.digests()) == [digest]
