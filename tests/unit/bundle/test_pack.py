"""Sealing: reproducible, all or nothing, and never over what is not a bundle."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, UnitRecord
from aotgaudi.digest import sha256_file
from aotgaudi.errors import CorruptError, ManifestError, StoreError
from aotgaudi.store.cas import object_path
from tests.unit.failing import raising

if TYPE_CHECKING:
    from tests.unit.bundle.conftest import Sealed


def contents(root: Path) -> dict[str, tuple[str, int]]:
    """Every file below `root`: sha256 and mode by relative path. Directories have mode 0755."""
    paths = [root, *root.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o755}
    return {
        str(path.relative_to(root)): (sha256_file(path), stat.S_IMODE(path.stat().st_mode))
        for path in paths
        if path.is_file()
    }


def inodes(root: Path) -> set[int]:
    return {path.stat().st_ino for path in root.rglob("*")}


def neighbours(sealed: Sealed) -> set[str]:
    return {path.name for path in sealed.path.parent.iterdir()} - {"store"}


def test_the_layout(sealed: Sealed) -> None:
    objects = {
        str(object_path(sealed.path, digest).relative_to(sealed.path)) for digest in sealed.digests.values()
    }
    found = contents(sealed.path)

    assert set(found) == {"aotgaudi.bundle.json", "manifest.json", "receipt.json", *objects}
    assert (sealed.path / "manifest.json").read_bytes() == sealed.manifest_bytes
    assert {found[name][1] for name in objects} == {0o444}
    assert {mode for name, (_, mode) in found.items() if name not in objects} == {0o644}
    index = sealed.open().index
    assert (index.counts.programs, index.counts.units, index.counts.objects) == (2, 2, 5)
    assert index.counts.object_bytes == sum(digest.size_bytes for digest in sealed.digests.values())
    assert index.backend == "fake"


def test_sealing_elsewhere_gives_the_same_files(sealed: Sealed, tmp_path: Path) -> None:
    """Another order of building, other timings, another umask: the same bytes and modes."""
    units = {}
    for key in (sealed.layer, sealed.shared):
        unit = sealed.receipt.units[key]
        units[key] = UnitRecord(
            **unit.model_dump(mode="json"), label="other", compile_seconds=99.0, max_abs_error=0.0
        )
    programs = dict(reversed(sealed.receipt.programs.items()))
    receipt = sealed.receipt.model_copy(update={"programs": programs})
    receipt = Receipt(**{**dict(receipt), "units": units})
    previous = os.umask(0o077)
    try:
        sealed.pack(tmp_path / "deep" / "again", receipt)
    finally:
        os.umask(previous)

    assert contents(tmp_path / "deep" / "again") == contents(sealed.path)


def test_objects_are_copies_of_their_own(sealed: Sealed) -> None:
    """Damage to a bundle must not be damage to the store."""
    assert not inodes(sealed.path) & inodes(sealed.objects.root)


def test_an_identical_bundle_is_left_alone(sealed: Sealed) -> None:
    before = inodes(sealed.path)

    sealed.pack()

    assert inodes(sealed.path) == before
    assert neighbours(sealed) == {"bundle"}


@pytest.mark.parametrize("damage", ["flip", "remove", "stray", "manifest"])
def test_a_damaged_bundle_is_replaced(sealed: Sealed, damage: str) -> None:
    whole = contents(sealed.path)
    path = sealed.object("layer.so")
    if damage == "flip":
        path.write_bytes(b"?" + path.read_bytes()[1:])
    elif damage == "remove":
        path.unlink()
    elif damage == "stray":
        path.with_name("stray").write_bytes(b"")
    else:
        (sealed.path / "manifest.json").write_bytes(b"")

    sealed.pack()

    assert contents(sealed.path) == whole
    assert sealed.report().is_intact
    assert neighbours(sealed) == {"bundle"}


def test_another_bundle_is_replaced(sealed: Sealed) -> None:
    programs = {sealed.entries[2].id: sealed.receipt.programs[sealed.entries[2].id]}
    smaller = sealed.receipt.model_copy(
        update={"programs": programs, "units": {sealed.shared: sealed.receipt.units[sealed.shared]}}
    )

    sealed.pack(receipt=smaller)

    assert sealed.open().receipt == smaller
    assert sealed.open().index.counts.objects == 2
    assert neighbours(sealed) == {"bundle"}


def test_an_empty_directory_is_filled(sealed: Sealed, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    sealed.pack(tmp_path / "empty")

    assert contents(tmp_path / "empty") == contents(sealed.path)


def _foreign_directory(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("")


def _newer_bundle(path: Path) -> None:
    path.mkdir()
    (path / "aotgaudi.bundle.json").write_text('{"schema":"aotgaudi.bundle/2"}')


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_foreign_directory, "neither a bundle nor empty"),
        (_newer_bundle, "not a bundle that this aotgaudi can read"),
        (Path.touch, "not a directory"),
        (lambda path: path.symlink_to(path.parent), "not a directory"),
    ],
    ids=["foreign", "newer", "file", "link"],
)
def test_what_is_not_ours_is_not_replaced(sealed: Sealed, tmp_path: Path, make: object, reason: str) -> None:
    out = tmp_path / "out"
    make(out)  # type: ignore[operator]

    with pytest.raises(StoreError, match=f"cannot seal a bundle at {out}: it is {reason}"):
        sealed.pack(out)
    assert os.path.lexists(out)
    assert not (out / "objects").exists()


def test_a_receipt_for_another_manifest_is_refused(sealed: Sealed) -> None:
    with pytest.raises(ManifestError, match=f"answers manifest {sealed.manifest_id}, not other"):
        pack_bundle(sealed.manifest_bytes, "other", sealed.receipt, sealed.objects, sealed.path)


def test_a_program_whose_unit_is_not_in_the_receipt_is_refused(sealed: Sealed) -> None:
    partial = sealed.receipt.model_copy(
        update={"units": {sealed.shared: sealed.receipt.units[sealed.shared]}}
    )

    with pytest.raises(ManifestError, match=f"unit {sealed.layer[:12]}"):
        sealed.pack(receipt=partial)


@pytest.mark.parametrize("name", ["shared.so", "constants", "model"])
def test_a_damaged_store_does_not_reach_a_bundle(sealed: Sealed, tmp_path: Path, name: str) -> None:
    path = sealed.objects.path(sealed.digests[name])
    path.chmod(0o644)
    path.write_bytes(b"?" + path.read_bytes()[1:])

    with pytest.raises(CorruptError, match=str(sealed.digests[name])):
        sealed.pack(tmp_path / "out")
    assert neighbours(sealed) == {"bundle"}


def test_an_object_that_the_store_lacks_is_named(sealed: Sealed, tmp_path: Path) -> None:
    sealed.objects.discard(sealed.digests["layer.so"])

    with pytest.raises(StoreError, match=f"{sealed.digests['layer.so']} is not in the store"):
        sealed.pack(tmp_path / "out")
    assert neighbours(sealed) == {"bundle"}


@pytest.mark.parametrize("call", ["fsync", "fchmod", "rename"])
def test_a_full_disk_leaves_the_old_bundle(
    sealed: Sealed, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = contents(sealed.path)
    other = sealed.receipt.model_copy(update={"builder": {"aotgaudi": "2"}})

    monkeypatch.setattr("aotgaudi.bundle.staging.exchange_names", raising(errno.ENOSPC))
    monkeypatch.setattr(os, call, raising(errno.ENOSPC))
    with pytest.raises(
        StoreError, match=r"cannot write the bundle .*bundle: No space left.*bytes are needed"
    ):
        sealed.pack(receipt=other)
    monkeypatch.undo()

    assert contents(sealed.path) == before
    assert neighbours(sealed) == {"bundle"}


def test_the_old_bundle_is_put_back_when_the_new_cannot_take_its_place(
    sealed: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(sealed.path)
    other = sealed.receipt.model_copy(update={"builder": {"aotgaudi": "2"}})
    rename = os.rename

    def refuse_the_new(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_the_new)
    monkeypatch.setattr("aotgaudi.bundle.staging.exchange_names", lambda *_: False)
    with pytest.raises(StoreError, match="Input/output error"):
        sealed.pack(receipt=other)
    monkeypatch.undo()

    assert contents(sealed.path) == before
    assert neighbours(sealed) == {"bundle"}


def test_what_a_dead_process_of_our_number_left_is_swept(sealed: Sealed, tmp_path: Path) -> None:
    left = tmp_path / f"out.tmp-{os.getpid()}"
    _foreign_directory(left)

    sealed.pack(tmp_path / "out")

    assert contents(tmp_path / "out") == contents(sealed.path)
    assert not left.exists()
