"""The action index: JSON only, owner only, and never a wrong answer."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sqlite3
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.store.action_index import ActionIndex

KEY, OTHER = "ab" * 32, "cd" * 32
VALUE: dict[str, Any] = {
    "artifact": {"unit.so": "sha256:00:1"},
    "seconds": 1.5,
    "nested": [1, None, {"é": True}],
}


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ActionIndex]:
    index = ActionIndex(tmp_path / "actions")
    yield index
    index.close()


def edit(index: ActionIndex, statement: str, *values: object) -> None:
    """Changes the database behind the index's back."""
    index.close()
    connection = sqlite3.connect(index.root / "cache.db")
    with connection:
        connection.execute(statement, values)
    connection.close()


def retired(index: ActionIndex) -> list[str]:
    return sorted(path.name for path in index.root.parent.glob("actions.corrupt-*"))


def test_what_is_put_is_got_by_a_later_process(index: ActionIndex) -> None:
    index.put(KEY, VALUE)
    index.close()

    again = ActionIndex(index.root)
    assert again.get(KEY) == VALUE
    assert again.get(OTHER) is None
    again.close()


def test_get_many_returns_the_hits_in_order(index: ActionIndex) -> None:
    index.put(KEY, {"n": 1})
    index.put(OTHER, {"n": 2})

    assert list(index.get_many([OTHER, "00" * 32, KEY]).items()) == [(OTHER, {"n": 2}), (KEY, {"n": 1})]
    assert index.get_many([]) == {}


def test_put_replaces_and_discard_forgets(index: ActionIndex) -> None:
    index.put(KEY, {"n": 1})
    index.put(KEY, {"n": 2})
    index.put(OTHER, {"n": 3})
    assert index.get(KEY) == {"n": 2}
    assert list(index) == [KEY, OTHER]

    index.discard(KEY)
    index.discard(KEY)

    assert index.get(KEY) is None
    assert list(index) == [OTHER]


def test_nothing_is_touched_before_the_first_use(tmp_path: Path) -> None:
    ActionIndex(tmp_path / "actions").close()

    assert list(tmp_path.iterdir()) == []


def test_the_directory_is_for_its_owner_alone(index: ActionIndex) -> None:
    previous = os.umask(0)
    try:
        index.put(KEY, VALUE)
    finally:
        os.umask(previous)

    assert stat.S_IMODE(index.root.stat().st_mode) == 0o700


def test_a_readable_directory_is_closed_to_others(index: ActionIndex) -> None:
    index.root.mkdir(mode=0o755)

    index.put(KEY, VALUE)

    assert stat.S_IMODE(index.root.stat().st_mode) == 0o700


def test_a_directory_that_others_could_write_to_is_refused(index: ActionIndex) -> None:
    index.root.mkdir()
    index.root.chmod(0o777)

    with pytest.raises(StoreError, match="others may write to it"):
        index.get(KEY)


def test_a_link_to_a_directory_is_refused(index: ActionIndex, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    index.root.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StoreError, match="not a link"):
        index.put(KEY, VALUE)


def test_a_path_that_diskcache_would_expand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"must not contain '\$'"):
        ActionIndex(tmp_path / "$HOME").get(KEY)


class _Bomb:
    """Unpickling this makes a directory at the path that it was given."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._path,)


def test_a_value_in_pickle_mode_is_refused_unread(index: ActionIndex, tmp_path: Path) -> None:
    index.put(KEY, VALUE)
    edit(index, "UPDATE Cache SET mode = 4, value = ?", pickle.dumps(_Bomb(tmp_path / "owned")))

    with pytest.raises(CorruptError, match="mode 4"):
        index.get(KEY)
    assert not (tmp_path / "owned").exists()
    assert retired(index) == [], "an attack is not swept away"


def test_a_key_in_pickle_mode_is_refused_unread(index: ActionIndex, tmp_path: Path) -> None:
    index.put(KEY, VALUE)
    edit(index, "UPDATE Cache SET raw = 0, key = ?", pickle.dumps(_Bomb(tmp_path / "owned")))

    with pytest.raises(CorruptError, match="a key in pickle mode"):
        list(index)
    assert not (tmp_path / "owned").exists()
    assert index.get(KEY) is None


def test_a_value_in_a_file_is_refused(index: ActionIndex, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(zlib.compress(json.dumps([KEY, {"n": 1}]).encode()))
    index.put(KEY, VALUE)

    for mode in (1, 2, 3):
        edit(index, "UPDATE Cache SET mode = ?, filename = ?, value = NULL", mode, str(secret))
        with pytest.raises(CorruptError, match="mode"):
            index.get(KEY)


def test_large_values_stay_in_the_row(index: ActionIndex) -> None:
    value = {"text": os.urandom(1 << 20).hex()}

    index.put(KEY, value)

    assert index.get(KEY) == value
    assert {path.name for path in index.root.iterdir()} <= {"cache.db", "cache.db-wal", "cache.db-shm"}


def test_nothing_is_ever_evicted_or_counted(index: ActionIndex) -> None:
    index.put(KEY, VALUE)
    index.close()
    connection = sqlite3.connect(index.root / "cache.db")
    settings = dict(connection.execute("SELECT key, value FROM Settings"))
    connection.close()

    assert settings["cull_limit"] == 0
    assert settings["statistics"] == 0
    assert settings["eviction_policy"] == "none"
    assert settings["size_limit"] >= 1 << 50


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": float("inf")}])
def test_a_number_that_json_lacks_is_refused(index: ActionIndex, value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        index.put(KEY, value)
    assert index.get(KEY) is None


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
def test_a_damaged_database_is_moved_aside_and_begun_anew(
    index: ActionIndex, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        index.put(f"{number:064x}", {"text": os.urandom(500).hex()})
    index.close()
    for name in ("cache.db-wal", "cache.db-shm"):
        (index.root / name).unlink(missing_ok=True)
    damage(index.root / "cache.db")

    with caplog.at_level(logging.WARNING):
        found = index.get_many([f"{number:064x}" for number in range(50)])
        index.put(KEY, VALUE)

    assert found == {}
    assert index.get(KEY) == VALUE
    assert list(index) == [KEY]
    assert retired(index) == ["actions.corrupt-1"]
    assert "is damaged" in caplog.text


def test_a_second_damage_gets_the_next_number(index: ActionIndex) -> None:
    for _ in range(2):
        index.put(KEY, VALUE)
        edit(index, "UPDATE Cache SET value = x'00'")
        assert index.get(KEY) is None

    assert retired(index) == ["actions.corrupt-1", "actions.corrupt-2"]


def test_a_flipped_bit_in_a_value_is_no_hit(index: ActionIndex) -> None:
    """zlib's checksum is around every row; SQLite itself has none."""
    row = bytearray(zlib.compress(json.dumps([KEY, {"n": 1}]).encode()))
    for position in range(len(row) * 8):
        index.put(KEY, {"n": 1})
        flipped = bytearray(row)
        flipped[position // 8] ^= 1 << position % 8
        edit(index, "UPDATE Cache SET value = ?", bytes(flipped))
        assert index.get(KEY) in (None, {"n": 1})


def test_a_value_under_another_key_is_no_hit(index: ActionIndex) -> None:
    index.put(KEY, {"n": 1})
    index.put(OTHER, {"n": 2})
    edit(index, "UPDATE Cache SET value = (SELECT value FROM Cache ORDER BY rowid LIMIT 1)")

    assert index.get(OTHER) is None
    assert retired(index) == ["actions.corrupt-1"]


def test_one_rebuilds_and_the_other_joins(index: ActionIndex) -> None:
    """Of two that find the same damage, the second does not move the first one's new database aside."""
    index.put(KEY, VALUE)
    edit(index, "UPDATE Cache SET value = x'00'")
    late = ActionIndex(index.root)
    assert list(late) == [KEY]

    assert index.get(KEY) is None
    index.put(KEY, {"n": 1})
    assert late.get(KEY) == {"n": 1}

    assert retired(index) == ["actions.corrupt-1"]
    late.close()


def test_threads_share_one_index(index: ActionIndex) -> None:
    def fill(worker: int) -> None:
        for number in range(10):
            index.put(f"{worker}-{number}", {"n": number})
        index.close()

    threads = [threading.Thread(target=fill, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(list(index)) == 40


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StoreError, match="cannot use the action index"):
        ActionIndex(tmp_path / "file" / "actions").get(KEY)


def test_diskcache_is_imported_only_when_used() -> None:
    code = (
        "import sys, aotgaudi.store.store;"
        "print([m for m in ('diskcache', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
