"""Checking a store: all of the bad is found and removed, none of the good, and what to rebuild is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.store import fsck
from aotgaudi.store.cas import object_path
from aotgaudi.store.fsck import check_store
from aotgaudi.store.store import Root, Store
from tests.unit.failing import raising

KEY, OTHER = "ab" * 32, "cd" * 32
DATA = b"the bytes of an artifact" * 50
DIGEST = Digest.of(DATA)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two objects and two records, one of each for the other."""
    store = Store.open(tmp_path / "store")
    store.actions.put(KEY, {"label": "layer a", "artifact": {"unit.so": str(store.objects.put_bytes(DATA))}})
    store.actions.put(
        OTHER, {"label": "head b", "artifact": {"unit.so": str(store.objects.put_bytes(b"other"))}}
    )
    return store


def rewrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit flip": lambda path: rewrite(path, bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "truncated to nothing": lambda path: rewrite(path, b""),
    "truncated to half": lambda path: rewrite(path, path.read_bytes()[: path.stat().st_size // 2]),
    "one byte short": lambda path: rewrite(path, path.read_bytes()[:-1]),
    "one byte more": lambda path: rewrite(path, path.read_bytes() + b"\0"),
    "a directory": replaced_by(Path.mkdir),
    "a symlink": replaced_by(lambda path: path.symlink_to("/dev/null")),
    "a FIFO": replaced_by(os.mkfifo),
}


def test_a_sound_store_is_clean(store: Store) -> None:
    report = check_store(store, 2)

    assert report.is_clean
    assert (report.num_objects, report.num_records, report.losses) == (2, 2, ())
    assert report.object_bytes == len(DATA) + len(b"other")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_object_is_removed_and_its_unit_is_named(
    store: Store, damage: Callable[[Path], object]
) -> None:
    path = object_path(store.root, DIGEST)
    damage(path)

    report = check_store(store, 2)

    (item,) = report.damage
    assert item.path == f"objects/sha256/{DIGEST.sha256[:2]}/{DIGEST.sha256}"
    assert item.is_removed
    assert not os.path.lexists(path)
    assert [(loss.key, loss.value["label"], loss.missing) for loss in report.losses] == [
        (KEY, "layer a", (DIGEST,))
    ]
    again = check_store(store)
    assert again.is_clean
    assert len(again.losses) == 1
    store.objects.put_bytes(DATA)
    assert check_store(store).losses == ()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_removed_and_is_a_miss(store: Store, damage: Callable[[Path], object]) -> None:
    damage(store.actions.records.path(KEY))

    (item,) = check_store(store).damage

    assert item.path == f"records/ab/{KEY}.json"
    assert store.actions.get(KEY) is None
    assert list(store.actions) == [OTHER]
    assert check_store(store).is_clean


def test_two_records_that_were_swapped_are_both_bad(store: Store) -> None:
    one, two = store.actions.records.path(KEY), store.actions.records.path(OTHER)
    one.rename(one.with_name("x"))
    two.rename(one)
    one.with_name("x").rename(two)

    assert len(check_store(store).damage) == 2
    assert list(store.actions) == []


def test_what_does_not_belong_where_objects_and_records_lie_is_removed(store: Store) -> None:
    for name in (
        "objects/sha256/zz",
        "objects/sha256/ab/notes.txt",
        "records/readme",
        f"records/ab/{OTHER}.json",
    ):
        path = store.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("?")
    silly = store.root / "objects" / "sha256" / "ab" / ".nfs0000000000001"
    silly.write_text("open elsewhere")

    report = check_store(store)

    assert len(report.damage) == 4
    assert silly.exists()
    assert check_store(store).is_clean


def test_a_directory_with_a_name_of_others_is_told_and_stays(store: Store) -> None:
    names = ["objects/sha256/ab/mine", "objects/sha256/lost+found", "records/mine"]
    for name in names:
        (store.root / name / "inner").mkdir(parents=True)

    damage = check_store(store).damage

    assert sorted((item.path, item.is_removed) for item in damage) == [(name, False) for name in names]
    assert all((store.root / name / "inner").is_dir() for name in names)


def test_a_dry_run_and_a_read_only_store_remove_nothing(store: Store) -> None:
    path = object_path(store.root, DIGEST)
    rewrite(path, b"?" * len(DATA))

    for report in (check_store(store, remove=False), check_store(Store.open(store.root, read_only=True))):
        assert [item.is_removed for item in report.damage] == [False]
        assert [loss.key for loss in report.losses] == [KEY]
    assert path.exists()


def test_an_object_that_is_mended_meanwhile_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fsck._find_bad
    rewrite(object_path(store.root, DIGEST), b"?" * len(DATA))

    def mend_after(*arguments: Any) -> Any:
        found = real(*arguments)
        store.objects.put_bytes(DATA)
        return found

    monkeypatch.setattr(fsck, "_find_bad", mend_after)

    assert check_store(store).is_clean
    assert store.objects.read(DIGEST) == DATA


def test_a_root_that_cannot_be_read_is_named_and_stays(store: Store) -> None:
    store.roots.put(Root(name="prod"))
    path = store.root / "roots" / "prod.json"
    path.write_text("{}")

    (item,) = check_store(store).damage

    assert (item.path, item.is_removed) == ("roots/prod.json", False)
    assert path.exists()


def test_an_object_that_is_absent_is_a_loss_and_no_damage(store: Store) -> None:
    store.objects.discard(DIGEST)

    report = check_store(store)

    assert report.is_clean
    assert [loss.missing for loss in report.losses] == [(DIGEST,)]


def test_damage_that_cannot_be_removed_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(object_path(store.root, DIGEST), b"")

    monkeypatch.setattr(Path, "unlink", raising(30))
    with pytest.raises(StoreError, match=r"cannot remove .*Read-only"):
        check_store(store)
