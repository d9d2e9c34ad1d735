"""Layered and read-only stores: look-ups go down, writes go to the top, and a layer is never touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.store.cas import object_path
from aotgaudi.store.store import Store

KEY, OTHER, THIRD = "ab" * 32, "cd" * 32, "ef" * 32


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every path with its inode, size and mtime: equal snapshots mean that nothing was written."""
    rows = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        rows[str(path.relative_to(root))] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return rows


@pytest.fixture
def image(tmp_path: Path) -> Store:
    """A store as an image layer has it: whole, and nobody's to write."""
    store = Store.open(tmp_path / "image")
    digest = store.objects.put_bytes(b"of the image")
    store.actions.put(KEY, {"object": str(digest), "from": "image"})
    store.actions.records.touch(KEY, 0.0)
    return store


def test_what_the_top_lacks_comes_from_below(tmp_path: Path, image: Store) -> None:
    digest = Digest.of(b"of the image")
    store = Store.open(tmp_path / "top", lower=[image.root])

    assert store.actions.get(KEY) == {"object": str(digest), "from": "image"}
    assert store.objects.has(digest)
    assert store.objects.read(digest) == b"of the image"
    assert store.objects.path(digest) == object_path(image.root, digest)
    store.objects.verify(digest)
    assert list(store.actions) == [], "its own records only"


def test_writes_go_to_the_top_and_the_layer_is_not_touched(tmp_path: Path, image: Store) -> None:
    before = snapshot(image.root)
    store = Store.open(tmp_path / "top", lower=[image.root])

    store.objects.put_bytes(b"new")
    store.actions.put(OTHER, {"n": 1})
    store.actions.put(KEY, {"from": "top"})
    store.actions.get_many([KEY, OTHER, THIRD])
    store.actions.note_use([KEY])
    store.actions.discard(OTHER)
    store.objects.discard(Digest.of(b"of the image"))
    with store.in_use(), store.locks.try_unit(KEY):
        pass

    assert snapshot(image.root) == before
    assert store.actions.get(KEY) == {"from": "top"}
    store.actions.discard(KEY)
    assert store.actions.get(KEY) == {"object": str(Digest.of(b"of the image")), "from": "image"}


def test_what_a_layer_has_intact_is_not_stored_again(tmp_path: Path, image: Store) -> None:
    store = Store.open(tmp_path / "top", lower=[image.root])
    source = tmp_path / "source"
    source.write_bytes(b"of the image")

    store.objects.put_bytes(b"of the image")
    store.objects.put_file(source)

    assert list(store.objects.digests()) == []


def test_damage_in_a_layer_is_mended_in_the_top(tmp_path: Path, image: Store) -> None:
    digest = Digest.of(b"of the image")
    path = object_path(image.root, digest)
    path.chmod(0o644)
    path.write_bytes(b"OF THE IMAGE")
    store = Store.open(tmp_path / "top", lower=[image.root])

    with pytest.raises(CorruptError, match=str(image.root)):
        store.objects.read(digest)
    assert path.exists(), "a layer is nobody's to mend"

    store.objects.put_bytes(b"of the image")
    assert store.objects.read(digest) == b"of the image"


def test_damage_in_the_top_is_covered_by_the_layer_and_removed(tmp_path: Path, image: Store) -> None:
    digest = Digest.of(b"of the image")
    store = Store.open(tmp_path / "top", lower=[image.root])
    path = object_path(store.root, digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"OF THE IMAGE")

    assert store.objects.read(digest) == b"of the image"

    assert not path.exists()


def test_the_first_of_several_layers_wins(tmp_path: Path, image: Store) -> None:
    second = Store.open(tmp_path / "second")
    second.actions.put(KEY, {"from": "second"})
    second.actions.put(OTHER, {"from": "second"})

    store = Store.open(tmp_path / "top", lower=[second.root, image.root])

    assert store.actions.get_many([THIRD, OTHER, KEY]) == {OTHER: {"from": "second"}, KEY: {"from": "second"}}


def test_a_bundle_is_a_layer_of_objects(tmp_path: Path) -> None:
    digest = Digest.of(b"in the bundle")
    path = object_path(tmp_path / "bundle", digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"in the bundle")

    store = Store.open(tmp_path / "top", lower=[tmp_path / "bundle"])

    assert store.objects.read(digest) == b"in the bundle"
    assert store.actions.get(KEY) is None


def test_a_layer_that_is_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    other = Store.open(tmp_path / "other")
    (other.root / "format").write_text("aotgaudi.store/9\n")

    for lower, words in (
        (tmp_path / "empty", "neither a store"),
        (tmp_path / "none", "neither"),
        (other.root, "/9"),
    ):
        with pytest.raises(StoreError, match=words):
            Store.open(tmp_path / "top", lower=[lower])


def test_a_read_only_store_answers_and_nothing_in_it_changes(tmp_path: Path, image: Store) -> None:
    before = snapshot(image.root)
    digest = Digest.of(b"of the image")

    store = Store.open(image.root, read_only=True)
    with store.in_use():
        assert store.actions.get(KEY) is not None
        assert store.objects.read(digest) == b"of the image"
        store.actions.note_use([KEY])
    assert store.index is None

    assert snapshot(image.root) == before


def test_writing_to_a_read_only_store_is_refused(image: Store) -> None:
    store = Store.open(image.root, read_only=True)

    for write in (
        lambda: store.actions.put(OTHER, {}),
        lambda: store.actions.discard(KEY),
        store.require_writable,
    ):
        with pytest.raises(StoreError, match="read-only"):
            write()


def test_damage_in_a_read_only_store_is_an_error_and_stays(image: Store) -> None:
    digest = Digest.of(b"of the image")
    path = object_path(image.root, digest)
    path.chmod(0o644)
    path.write_bytes(b"OF THE IMAGE")
    before = snapshot(image.root)
    store = Store.open(image.root, read_only=True)

    with pytest.raises(CorruptError, match="cache fsck"):
        store.objects.read(digest)

    assert snapshot(image.root) == before


def test_a_missing_store_is_not_made_read_only(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        Store.open(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


_AS_ANYBODY = """
import os, sys
from pathlib import Path
import aotgaudi.store.store  # While these files can be read.
from aotgaudi.cli.options import StorePlace
os.environ.pop("HOME", None)
os.setgid(54321)
os.setuid(54321)
store = StorePlace(Path(sys.argv[1])).open()
assert store.read_only and store.actions.get("ab" * 32) is not None
with store.in_use():
    store.objects.read(next(store.objects.digests()))
"""


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_any_uid_without_home_or_a_name_reads_a_store_that_belongs_to_root() -> None:
    """As a container runs: no entry in the password file, no $HOME, and a layer that it may only read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        image = Store.open(Path(folder) / "image")
        image.actions.put(KEY, {"object": str(image.objects.put_bytes(b"of the image"))})
        before = snapshot(image.root)

        done = subprocess.run(
            [sys.executable, "-c", _AS_ANYBODY, str(image.root)], capture_output=True, text=True, check=False
        )

        assert done.returncode == 0, done.stderr
        assert snapshot(image.root) == before
