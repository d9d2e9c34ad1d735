"""The index of look-ups: a cache that may lack anything and must never be wrong."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aotgaudi.store.cas import object_path
from aotgaudi.store.store import MOST_ROW_BYTES, MOST_ROWS, Index, Store

ROW = {"records": {"a" * 64: [2**63 + 7, 123]}, "objects": {"b" * 64: 9}}


KEYS = [f"{number:064x}" for number in range(5)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Five records, each with an object, all of them remembered."""
    store = Store.open(tmp_path / "store")
    digests = [store.objects.put_bytes(key.encode()) for key in KEYS]
    for key, digest in zip(KEYS, digests, strict=True):
        store.actions.put(key, {"object": str(digest)})
    store.remember(KEYS, [], digests)
    return store


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


def test_a_row_is_there_for_every_later_process(index: Index) -> None:
    assert index.get("x") is None

    index.put("x", ROW)
    index.put("y", {"records": {}})

    assert Index(index.root).get("x") == ROW
    assert len(index) == 2


def test_a_later_row_takes_the_place_of_an_earlier_one(index: Index) -> None:
    index.put("x", ROW)
    index.put("x", {"records": {}})

    assert index.get("x") == {"records": {}}


def test_the_rows_written_last_are_kept(index: Index) -> None:
    for number in range(MOST_ROWS + 3):
        index.put(f"{number}", {"n": number})
        os.utime(index.root / f"{number}.json", (number, number))
    index.put("last", ROW)

    assert len(index) == MOST_ROWS
    assert [index.get(f"{number}") for number in range(4)] == [None] * 4
    assert index.get("last") == ROW


def _flip(data: bytes) -> bytes:
    return data.replace(b"123", b"124")


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"[" * 100_000,
        lambda data: b"\xff\xfe",
        lambda data: json.dumps([1]).encode(),
        lambda data: data.replace(b'"x"', b'"y"'),
    ],
    ids=["a digit", "cut", "empty", "deep", "no text", "a list", "another name"],
)
def test_a_damaged_row_is_a_miss_and_is_replaced(index: Index, damage: object) -> None:
    index.put("x", ROW)
    path = index.root / "x.json"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]

    assert index.get("x") is None
    index.put("x", ROW)
    assert index.get("x") == ROW


def test_what_is_no_file_is_a_miss(index: Index) -> None:
    index.root.mkdir()
    os.mkfifo(index.root / "x.json")
    (index.root / "y.json").mkdir()

    assert index.get("x") is index.get("y") is None


def test_a_row_too_large_is_not_remembered(index: Index) -> None:
    index.put("x", {"long": "x" * MOST_ROW_BYTES})

    assert index.get("x") is None


def test_an_index_that_cannot_be_written_is_a_warning(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    index.root.write_bytes(b"in the way")

    index.put("x", ROW)

    assert index.get("x") is None
    assert "a look-up is not remembered" in caplog.text


def test_many_writers_leave_whole_rows(index: Index) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: index.put("x", {"n": number}), range(64)))

    assert index.get("x") is not None
    assert len(index) == 1


def test_what_was_remembered_is_known_without_reading_a_record(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.store.records.read_record", None)

    assert store.remembers(KEYS)
    assert not store.remembers(KEYS[:4])
    assert not store.remembers(KEYS[::-1])
    assert not store.remembers([])


def test_a_record_that_is_gone_or_another_one_is_noticed(store: Store) -> None:
    store.actions.discard(KEYS[2])
    assert not store.remembers(KEYS)

    store.actions.put(KEYS[2], {"other": "result"})
    assert not store.remembers(KEYS)


@pytest.mark.parametrize("data", [None, b"", b"short"])
def test_an_object_that_is_gone_or_of_another_size_is_noticed(store: Store, data: bytes | None) -> None:
    path = object_path(store.root, next(iter(store.objects.digests())))
    path.unlink()
    if data is not None:
        path.write_bytes(data)

    assert not store.remembers(KEYS)


def test_what_is_not_all_there_is_not_remembered(store: Store) -> None:
    store.remember(KEYS[:1], ["ff" * 32], [])

    assert not store.remembers(KEYS[:1])


def test_losing_the_index_costs_a_look_up_and_nothing_else(store: Store) -> None:
    shutil.rmtree(store.root / "index")

    assert not store.remembers(KEYS)
    assert len(store.actions.get_many(KEYS)) == len(KEYS)
    store.remember(KEYS, [], store.objects.digests())
    assert store.remembers(KEYS)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"records": {}, "objects": {}},
        {"records": []},
        {"records": {}, "objects": []},
        {"records": dict.fromkeys(KEYS, "x"), "objects": {}},
    ],
)
def test_a_row_of_another_shape_says_nothing(store: Store, row: dict[str, object]) -> None:
    assert store.index is not None
    (path,) = store.index.root.iterdir()
    name = path.stem
    store.index.put(name, row)

    assert not store.remembers(KEYS)


def test_without_an_index_nothing_is_known(store: Store) -> None:
    bare = Store.open(store.root, read_only=True)

    assert not bare.remembers(KEYS)
    bare.remember(KEYS, [], [])


def test_other_layers_are_another_look_up(store: Store, tmp_path: Path) -> None:
    top = Store.open(tmp_path / "top", lower=[store.root])
    top.remember(KEYS, [], list(store.objects.digests()))
    assert top.remembers(KEYS)

    store.actions.discard(KEYS[0])

    assert not top.remembers(KEYS)


def test_a_use_is_noted_when_the_last_one_is_old_and_not_at_every_look(store: Store) -> None:
    path = store.actions.records.path(KEYS[0])
    os.utime(path, (0, 0))

    assert store.remembers(KEYS)
    noted = path.stat().st_mtime
    assert noted > 1.0e9
    os.utime(path, (noted - 60, noted - 60))

    assert store.remembers(KEYS)
    assert path.stat().st_mtime == pytest.approx(noted - 60)
