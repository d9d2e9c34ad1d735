"""What the index remembers: only ever what records said, and only as long as it is all still there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from aotgaudi.errors import StoreError
from aotgaudi.store import checklist
from aotgaudi.store.action_index import ActionIndex
from aotgaudi.store.cas import object_path
from aotgaudi.store.checklist import is_checked_off, remember
from aotgaudi.store.store import Store

KEYS = [f"{number:064x}" for number in range(5)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Five records, each with an object, all of them remembered."""
    store = Store.open(tmp_path / "store")
    digests = [store.objects.put_bytes(key.encode()) for key in KEYS]
    for key, digest in zip(KEYS, digests, strict=True):
        store.actions.put(key, {"object": str(digest)})
    remember(store, KEYS, [], digests)
    return store


def test_what_was_remembered_is_known_without_reading_a_record(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not (store.root / "index").is_symlink()
    monkeypatch.setattr("aotgaudi.store.records.read_record", None)

    assert is_checked_off(store, KEYS)
    assert not is_checked_off(store, KEYS[:4])
    assert not is_checked_off(store, KEYS[::-1])
    assert not is_checked_off(store, [])


def test_another_process_knows_it_too(store: Store) -> None:
    store.close()

    assert is_checked_off(Store.open(store.root), KEYS)


def test_a_record_that_is_gone_or_another_one_is_noticed(store: Store) -> None:
    store.actions.discard(KEYS[2])
    assert not is_checked_off(store, KEYS)

    store.actions.put(KEYS[2], {"other": "result"})
    assert not is_checked_off(store, KEYS)


@pytest.mark.parametrize("data", [None, b"", b"short"])
def test_an_object_that_is_gone_or_of_another_size_is_noticed(store: Store, data: bytes | None) -> None:
    path = object_path(store.root, next(iter(store.objects.digests())))
    path.unlink()
    if data is not None:
        path.write_bytes(data)

    assert not is_checked_off(store, KEYS)


def test_what_is_not_all_there_is_not_remembered(store: Store) -> None:
    remember(store, KEYS[:1], ["ff" * 32], [])

    assert not is_checked_off(store, KEYS[:1])


def test_losing_the_index_costs_a_look_up_and_nothing_else(store: Store) -> None:
    assert store.rescan() == len(KEYS)

    assert not is_checked_off(store, KEYS)
    assert len(store.actions.get_many(KEYS)) == len(KEYS)
    remember(store, KEYS, [], store.objects.digests())
    assert is_checked_off(store, KEYS)


def test_a_damaged_index_is_begun_anew(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.close()
    for path in (store.root / "index").iterdir():
        path.write_bytes(b"no database" * 1000)
    again = Store.open(store.root)

    with caplog.at_level(logging.WARNING):
        assert not is_checked_off(again, KEYS)
        remember(again, KEYS, [], again.objects.digests())

    assert is_checked_off(again, KEYS)
    assert "is damaged" in caplog.text


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"records": {}, "objects": {}},
        {"records": []},
        {"records": {}, "objects": []},
        {"records": {KEYS[0]: "x"}, "objects": {}},
    ],
)
def test_a_row_of_another_shape_says_nothing(store: Store, row: dict[str, object]) -> None:
    assert store.index is not None
    for name in list(store.index):
        store.index.put(name, row)

    assert not is_checked_off(store, KEYS)


def test_an_index_that_cannot_be_used_is_done_without(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("cannot use the action index: disk full")

    monkeypatch.setattr(ActionIndex, "get", refuse)
    monkeypatch.setattr(ActionIndex, "put", refuse)

    assert not is_checked_off(store, KEYS)
    remember(store, KEYS, [], [])
    assert caplog.text.count("disk full") == 2


def test_without_an_index_nothing_is_known(store: Store) -> None:
    bare = Store.open(store.root, read_only=True)

    assert not is_checked_off(bare, KEYS)
    remember(bare, KEYS, [], [])


def test_other_layers_are_another_look_up(store: Store, tmp_path: Path) -> None:
    top = Store.open(tmp_path / "top", lower=[store.root])
    digests = list(store.objects.digests())
    remember(top, KEYS, [], digests)
    assert is_checked_off(top, KEYS)

    store.actions.discard(KEYS[0])

    assert not is_checked_off(top, KEYS)


def test_only_the_last_few_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checklist, "MOST_CHECKLISTS", 2)
    for key in KEYS[:3]:
        remember(store, [key], [], [])

    looked_up = (KEYS, KEYS[:1], KEYS[1:2], KEYS[2:3])
    assert [is_checked_off(store, keys) for keys in looked_up] == [False, False, True, True]


def test_a_use_is_noted_when_the_last_one_is_old_and_not_at_every_look(store: Store) -> None:
    path = store.actions.records.path(KEYS[0])
    os.utime(path, (0, 0))

    assert is_checked_off(store, KEYS)
    noted = path.stat().st_mtime
    assert noted > 1.0e9
    os.utime(path, (noted - 60, noted - 60))

    assert is_checked_off(store, KEYS)
    assert path.stat().st_mtime == pytest.approx(noted - 60)
