"""The index: what records said, as long as it is all still there; JSON only, owner only, never a wrong answer."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.store.cas import object_path
from aotgaudi.store.index import MOST_ROWS, Index
from aotgaudi.store.store import Store

KEYS = [f"{number:064x}" for number in range(5)]
NAME, OTHER = "ab" * 32, "cd" * 32


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


def edit(root: Path, statement: str, *values: object) -> None:
    """Changes the database behind the index's back."""
    connection = sqlite3.connect(root / "cache.db")
    with connection:
        connection.execute(statement, values)
    connection.close()


def retired(root: Path) -> list[str]:
    return sorted(path.name for path in root.parent.glob("index.corrupt-*"))


# What is remembered


def test_what_was_remembered_is_known_without_reading_a_record(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.store.records.read_record", None)

    assert store.remembers(KEYS)
    assert not store.remembers(KEYS[:4])
    assert not store.remembers(KEYS[::-1])
    assert not store.remembers([])


def test_another_process_knows_it_too(store: Store) -> None:
    store.close()

    assert Store.open(store.root).remembers(KEYS)


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
    store.close()
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
    (name,) = store.index.names()
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


def test_only_the_rows_that_were_written_last_are_kept(index: Index) -> None:
    names = [f"{number:064x}" for number in range(MOST_ROWS)]
    for name in (*names, names[0], OTHER):
        index.put(name, {"n": 1})

    assert index.names() == (*names[2:], names[0], OTHER)
    assert len(index) == MOST_ROWS
    assert index.get(names[1]) is None


# Who may use it


def test_nothing_is_touched_before_the_first_use(tmp_path: Path) -> None:
    Index(tmp_path / "index").close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_made_before", [False, True])
def test_the_directory_is_for_its_owner_alone(index: Index, is_made_before: bool) -> None:
    previous = os.umask(0)
    try:
        if is_made_before:
            index.root.mkdir(mode=0o755)
        index.put(NAME, {})
    finally:
        os.umask(previous)

    assert stat.S_IMODE(index.root.stat().st_mode) == 0o700
    assert {path.name for path in index.root.iterdir()} <= {"cache.db", "cache.db-wal", "cache.db-shm"}


def _writable(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)


def _linked(root: Path) -> None:
    (root.parent / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(root.parent / "elsewhere")


def _a_file(root: Path) -> None:
    root.write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "reason"),
    [(_writable, "others may write to it"), (_linked, "not a link"), (_a_file, "File exists")],
)
def test_a_directory_that_is_not_ours_alone_is_done_without(
    index: Index, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], reason: str
) -> None:
    make(index.root)

    index.put(NAME, {"n": 1})
    assert index.get(NAME) is None
    assert reason in caplog.text
    assert not list(index.root.parent.rglob("cache.db"))


def test_a_path_that_diskcache_would_expand_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Index(tmp_path / "$HOME").get(NAME) is None
    assert "must not contain '$'" in caplog.text


def test_a_database_that_is_full_is_done_without(
    index: Index, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("diskcache.Cache.set", refuse)

    index.put(NAME, {"n": 1})
    assert index.get(NAME) is None
    assert "disk is full" in caplog.text
    assert retired(index.root) == []


# Attacks


class _Bomb:
    """Unpickling this makes a directory at the path that it was given."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._path,)


def test_a_value_in_pickle_mode_is_moved_aside_unread(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.close()
    root = store.root / "index"
    edit(root, "UPDATE Cache SET mode = 4, value = ?", pickle.dumps(_Bomb(tmp_path / "owned")))

    assert not store.remembers(KEYS)
    assert not (tmp_path / "owned").exists()
    assert retired(root) == ["index.corrupt-1"]
    assert "mode 4" in caplog.text


def test_a_key_in_pickle_mode_is_moved_aside_unread(index: Index, tmp_path: Path) -> None:
    index.put(NAME, {})
    edit(index.root, "UPDATE Cache SET raw = 0, key = ?", pickle.dumps(_Bomb(tmp_path / "owned")))

    assert index.get(NAME) is None
    index.put(OTHER, {})
    assert not (tmp_path / "owned").exists()
    assert retired(index.root) == ["index.corrupt-1"]


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_a_value_in_a_file_is_not_read(index: Index, tmp_path: Path, mode: int) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(zlib.compress(json.dumps([NAME, {"n": 1}]).encode()))
    index.put(NAME, {})
    edit(index.root, "UPDATE Cache SET mode = ?, filename = ?, value = NULL", mode, str(secret))

    assert index.get(NAME) is None
    assert retired(index.root) == ["index.corrupt-1"]


def test_a_row_that_inflates_without_end_is_not_read(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.store.index.MOST_ROW_BYTES", 1 << 20)
    index.put(NAME, {})
    edit(index.root, "UPDATE Cache SET value = ?", zlib.compress(b" " * (64 << 20)))

    tracemalloc.start()
    assert index.get(NAME) is None
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20
    assert retired(index.root) == ["index.corrupt-1"]


def test_a_row_that_would_not_be_read_is_not_written(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.store.index.MOST_ROW_BYTES", 1000)

    index.put(NAME, {"text": "x" * 1000})

    assert index.get(NAME) is None
    assert retired(index.root) == []


# Damage


def _garbage(database: Path) -> None:
    database.write_bytes(b"not a database, by any stretch" * 400)


def _overwritten_pages(database: Path) -> None:
    data = bytearray(database.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    database.write_bytes(data)


def _truncated(database: Path) -> None:
    data = database.read_bytes()
    database.write_bytes(data[: len(data) // 2])


def _foreign_tables(database: Path) -> None:
    database.unlink()
    connection = sqlite3.connect(database)
    with connection:
        connection.execute(
            "CREATE TABLE Cache (rowid INTEGER PRIMARY KEY, key BLOB, raw INTEGER, unlike TEXT)"
        )
    connection.close()


@pytest.mark.parametrize("damage", [_garbage, _overwritten_pages, _truncated, _foreign_tables])
def test_a_damaged_database_is_moved_aside_and_costs_a_rescan(
    store: Store, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert store.index is not None
    for number in range(MOST_ROWS - 1):
        store.index.put(f"{number:064x}", {"text": os.urandom(5000).hex()})
    store.close()
    root = store.root / "index"
    for name in ("cache.db-wal", "cache.db-shm"):
        (root / name).unlink(missing_ok=True)
    damage(root / "cache.db")

    with caplog.at_level(logging.WARNING):
        assert not store.remembers(KEYS)
        store.remember(KEYS, [], store.objects.digests())

    assert store.remembers(KEYS)
    assert retired(root) == ["index.corrupt-1"]
    assert "is damaged" in caplog.text


def test_a_second_damage_gets_the_next_number(index: Index) -> None:
    for _ in range(2):
        index.put(NAME, {"n": 1})
        edit(index.root, "UPDATE Cache SET value = x'00'")
        assert index.get(NAME) is None

    assert retired(index.root) == ["index.corrupt-1", "index.corrupt-2"]


def test_a_flipped_bit_in_a_value_is_no_hit(index: Index) -> None:
    """zlib's checksum is around every row; SQLite itself has none."""
    row = bytearray(zlib.compress(json.dumps([NAME, {"n": 1}]).encode()))
    for position in range(0, len(row) * 8, 3):
        index.put(NAME, {"n": 1})
        flipped = bytearray(row)
        flipped[position // 8] ^= 1 << position % 8
        edit(index.root, "UPDATE Cache SET value = ?", bytes(flipped))
        assert index.get(NAME) in (None, {"n": 1})


def test_a_value_under_another_name_is_no_hit(index: Index) -> None:
    index.put(NAME, {"n": 1})
    index.put(OTHER, {"n": 2})
    edit(index.root, "UPDATE Cache SET value = (SELECT value FROM Cache ORDER BY rowid LIMIT 1)")

    assert index.get(OTHER) is None
    assert retired(index.root) == ["index.corrupt-1"]


def flip(data: bytes, numbers: random.Random) -> bytes:
    """`data` with 1 to 20 bits flipped, half of the times near each other."""
    flipped = bytearray(data)
    start, size = (0, len(data)) if numbers.random() < 0.5 else (numbers.randrange(len(data)), 64)
    for _ in range(numbers.randint(1, 20)):
        flipped[min(start + numbers.randrange(size), len(data) - 1)] ^= 1 << numbers.randrange(8)
    return bytes(flipped)


def test_flipped_bits_anywhere_cost_a_rescan_at_most(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """AOTGAUDI_NUM_FLIPS and AOTGAUDI_SEED are for ci/nightly."""
    assert store.index is not None
    store.index.put(NAME, {"n": 1})
    store.close()
    database = store.root / "index" / "cache.db"
    edit(database.parent, "PRAGMA wal_checkpoint(TRUNCATE)")
    sound, known = database.read_bytes(), store.index.names()
    seed = int(os.environ.get("AOTGAUDI_SEED", "1"))
    assert len(known) == 2

    for number in range(int(os.environ.get("AOTGAUDI_NUM_FLIPS", "150"))):
        shutil.rmtree(database.parent)
        database.parent.mkdir(mode=0o700)
        database.write_bytes(flip(sound, random.Random(f"{seed} {number}")))

        store.remembers(KEYS)  # Either is right, for what it is about is there.
        assert store.index.get(NAME) in (None, {"n": 1}), number
        assert store.index.get(OTHER) is None, number
        store.describe_index()
        for _ in range(2):  # Damage may be met when a row is read, and not when it is written.
            store.remember(KEYS, [], store.objects.digests())
            if store.remembers(KEYS):
                break
        assert store.remembers(KEYS), (number, caplog.text[-500:])
        store.close()
        for path in store.root.glob("index.corrupt-*"):
            shutil.rmtree(path)
        caplog.clear()


# Several at once


def test_threads_share_one_index(index: Index) -> None:
    def fill(worker: int) -> None:
        for number in range(4):
            index.put(f"{worker}-{number}", {"n": number})
        index.close()

    threads = [threading.Thread(target=fill, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(index) == 16


def test_diskcache_is_imported_only_where_there_is_an_index() -> None:
    code = (
        "import sys, aotgaudi.store.store;"
        "print([m for m in ('diskcache', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
