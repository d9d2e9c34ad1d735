"""What a remote answered is remembered, and costs nothing but time when it is damaged."""

from __future__ import annotations

import os
import pickle
import sqlite3
import threading
from pathlib import Path

import pytest

from aotgaudi.share import remote_cache
from aotgaudi.share.remote_cache import LARGEST_REMEMBERED_BYTES, RememberedAnswers
from aotgaudi.store.store import Store

ANSWERS = {"a" * 64: b'{"record": 1}', "b" * 64: None}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def memory(store: Store, url: str = "s3://bucket/team") -> RememberedAnswers:
    return RememberedAnswers.of(store, url)


def database(store: Store) -> Path:
    (path,) = (store.root / "index" / "remotes").glob("*/cache.db")
    return path


def test_a_later_build_knows_what_was_answered(store: Store) -> None:
    first = memory(store)
    assert first.recall(ANSWERS) == {}
    first.note(ANSWERS)
    first.close()

    later = memory(store)
    assert later.recall([*ANSWERS, "c" * 64]) == ANSWERS
    later.forget(["a" * 64])
    assert later.recall(ANSWERS) == {"b" * 64: None}
    assert memory(store, "s3://bucket/other").recall(ANSWERS) == {}


def test_that_there_was_nothing_is_forgotten_after_minutes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_cache, "MISS_SECONDS", -1.0)
    memory(store).note(ANSWERS)

    assert memory(store).recall(ANSWERS) == {"a" * 64: b'{"record": 1}'}


def test_only_its_user_may_read_it(store: Store) -> None:
    memory(store).note(ANSWERS)

    folder = database(store).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.name.endswith(f"-{os.geteuid()}")


@pytest.mark.parametrize("damage", ["noise", "empty", "cut", "no tables", "a directory", "values"])
def test_a_damaged_one_is_begun_anew(store: Store, damage: str) -> None:
    first = memory(store)
    first.note({f"{number:064x}": b"x" * 1000 for number in range(200)})
    first.close()
    path = database(store)
    if damage == "values":
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE Cache SET value = x'00ff'")
    elif damage == "no tables":
        path.unlink()
        sqlite3.connect(path).close()
    else:
        data = path.read_bytes()
        path.unlink()
        content = {"noise": os.urandom(9000), "empty": b"", "cut": data[: len(data) // 2]}
        path.mkdir() if damage == "a directory" else path.write_bytes(content[damage])

    found = memory(store)
    assert not set(found.recall([f"{number:064x}" for number in range(200)]).values()) - {b"x" * 1000}
    found.note(ANSWERS)
    assert memory(store).recall(ANSWERS) == ANSWERS


class _Evil:
    """What would make a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled_or_read_from_files(store: Store, tmp_path: Path) -> None:
    memory(store).note(ANSWERS)
    (tmp_path / "secret").write_text('"told"')
    for update in (
        ("UPDATE Cache SET mode = 4, value = ?", pickle.dumps(_Evil(tmp_path / "made"))),
        ("UPDATE Cache SET mode = 3, value = NULL, filename = ?", str(tmp_path / "secret")),
    ):
        with sqlite3.connect(database(store)) as connection:
            connection.execute(update[0], update[1:])

        found = memory(store)
        assert found.recall(ANSWERS) == {}
        found.note(ANSWERS)

    assert not (tmp_path / "made").exists()
    assert (tmp_path / "secret").exists()


def test_it_stays_within_its_bounds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_cache, "MOST_BYTES", 1 << 20)
    found = memory(store)
    found.note({"f" * 64: os.urandom(LARGEST_REMEMBERED_BYTES).hex().encode()})
    for start in range(0, 400, 20):
        found.note({f"{start + number:064x}": os.urandom(5000).hex().encode() for number in range(20)})
    found.close()

    assert database(store).stat().st_size < 3 << 20
    assert memory(store).recall(["f" * 64]) == {}


@pytest.mark.parametrize("place", ["read-only", "network"])
def test_nothing_is_remembered_where_sqlite_must_not_be(
    store: Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(remote_cache, "file_system", lambda _: "nfs4")
    found = memory(Store.open(store.root, read_only=True) if place == "read-only" else store)

    found.note(ANSWERS)

    assert found.recall(ANSWERS) == {}
    assert not (store.root / "index").exists()


def test_builders_share_it(store: Store) -> None:
    def use(number: int) -> None:
        found = memory(store)
        found.recall(ANSWERS)
        found.note({f"{number:064x}": b"x"})
        found.close()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    known = memory(store).recall([f"{number:064x}" for number in range(20)])
    assert set(known.values()) == {b"x"}
