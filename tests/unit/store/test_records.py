"""Records: the truth of a store. Written once, whole or absent; what is not one is a miss."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotgaudi import files
from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import StoreError
from aotgaudi.store.records import RecordError, RecordStore, dump_record, load_record
from tests.unit.failing import raising

KEY, OTHER = "ab" * 32, "cd" * 32
VALUE: dict[str, Any] = {
    "artifact": {"unit.so": "sha256:00:1"},
    "seconds": 1.5,
    "nested": [1, None, {"é": True}],
}
GOLDEN = (
    b'{"key":"abababababababababababababababababababababababababababababababab","schema":"aotgaudi.record/1",'
    b'"sha256":"73bdb25b23e1e75f5dd454c4aeddbf735d9cee55d2560ef55b0fc46b701ad94d",'
    b'"value":{"artifact":{"unit.so":"sha256:00:1"},"nested":[1,null,{"\xc3\xa9":true}],"seconds":1.5}}'
)


@pytest.fixture
def records(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path)


def rewrite(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def leftovers(records: RecordStore) -> list[str]:
    return [path.name for path in (records.root / "tmp").iterdir()]


def test_the_bytes_of_a_record_are_these() -> None:
    assert dump_record(KEY, VALUE) == GOLDEN


def test_a_record_is_canonical_json_whose_checksum_is_over_the_rest() -> None:
    rest = {"key": KEY, "schema": "aotgaudi.record/1", "value": VALUE}

    assert dump_record(KEY, VALUE) == canonical_json({**rest, "sha256": sha256_bytes(canonical_json(rest))})
    assert load_record(KEY, dump_record(KEY, VALUE)) == VALUE


def test_it_lies_under_its_key_read_only_and_nothing_is_left_in_tmp(records: RecordStore) -> None:
    assert records.publish(KEY, VALUE) == VALUE

    path = records.root / "records" / "ab" / f"{KEY}.json"
    assert records.path(KEY) == path
    assert path.read_bytes() == GOLDEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert leftovers(records) == []
    assert records.get(KEY) == VALUE
    assert records.get(OTHER) is None
    assert list(records.keys()) == [KEY]


def test_every_flipped_bit_is_a_miss(records: RecordStore) -> None:
    for position in range(len(GOLDEN) * 8):
        flipped = bytearray(GOLDEN)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(RecordError):
            load_record(KEY, bytes(flipped))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(GOLDEN[:-1], id="one byte short"),
        pytest.param(GOLDEN + b"\n", id="one byte more"),
        pytest.param(GOLDEN[: len(GOLDEN) // 2], id="half"),
        pytest.param(b"{}", id="another object"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(GOLDEN.replace(b"record/1", b"record/2"), id="another version"),
        pytest.param(dump_record(OTHER, VALUE), id="of another key"),
    ],
)
def test_what_is_no_record_of_the_key_is_a_miss_and_is_replaced(
    records: RecordStore, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(records.path(KEY), data)

    with pytest.raises(RecordError):
        records.load(KEY)
    assert records.get(KEY) is None
    assert "counts for nothing" in caplog.text
    assert records.publish(KEY, VALUE) == VALUE
    assert records.get(KEY) == VALUE


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "dangling"])
def test_anything_but_a_regular_file_is_a_miss_and_is_replaced(records: RecordStore, kind: str) -> None:
    """A link to a good record is refused too, and a FIFO does not block."""
    path = records.path(KEY)
    path.parent.mkdir(parents=True)
    (records.root / "good").write_bytes(GOLDEN)
    {
        "symlink": lambda: path.symlink_to(records.root / "good"),
        "dangling": lambda: path.symlink_to(records.root / "nothing"),
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }[kind]()

    assert records.get(KEY) is None
    assert records.stamp(KEY) is None
    assert records.publish(KEY, VALUE) == VALUE
    assert records.get(KEY) == VALUE


def test_the_first_publisher_wins_and_the_difference_is_logged(
    records: RecordStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    records.publish(KEY, {"n": 1, "same": 0})

    assert records.publish(KEY, {"n": 2, "same": 0}) == {"n": 1, "same": 0}
    assert records.get(KEY) == {"n": 1, "same": 0}
    assert "the first result stays; a later one differs in n" in caplog.text


def test_an_earlier_result_that_is_not_worth_keeping_is_replaced(records: RecordStore) -> None:
    records.publish(KEY, {"n": 1})

    assert records.publish(KEY, {"n": 2}, keep=lambda value: value["n"] == 3) == {"n": 2}
    assert records.publish(KEY, {"n": 5}, keep=lambda value: value["n"] == 2) == {"n": 2}


def test_equal_results_write_nothing(records: RecordStore) -> None:
    records.publish(KEY, VALUE)
    inode = records.path(KEY).stat().st_ino

    records.publish(KEY, VALUE, keep=lambda _: False)

    assert records.path(KEY).stat().st_ino == inode


@pytest.mark.parametrize(("module", "name"), [(RecordStore, "load"), (os, "fsync"), (os, "link")])
def test_of_two_that_start_together_both_get_the_same_answer(
    records: RecordStore, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    """Another publisher is quicker: right after our look, while we write, or right before our link."""
    real = getattr(module, name)

    def overtaken(*arguments: object, **options: object) -> object:
        monkeypatch.setattr(module, name, real)
        value = real(*arguments) if name == "load" else None
        RecordStore(records.root).publish(KEY, {"n": "theirs"})
        return value if name == "load" else real(*arguments, **options)

    monkeypatch.setattr(module, name, overtaken)

    assert records.publish(KEY, {"n": "ours"}) == {"n": "theirs"}
    assert records.get(KEY) == {"n": "theirs"}
    assert leftovers(records) == []


def test_a_file_system_without_hard_links_renames(
    records: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", raising(errno.EOPNOTSUPP))

    assert records.publish(KEY, {"n": 1}) == {"n": 1}
    assert records.publish(KEY, {"n": 2}) == {"n": 1}
    assert leftovers(records) == []


@pytest.mark.parametrize("key", ["", "ab", "AB" * 32, "../" + "a" * 61, "g" * 64, "ab" * 32 + "\n"])
def test_a_key_that_is_none_is_refused(records: RecordStore, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        records.publish(key, VALUE)
    with pytest.raises(ValueError, match="not a key"):
        records.path(key)
    assert list(records.root.iterdir()) == []


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": 2**53}, {"x": object()}])
def test_a_value_without_canonical_json_is_refused(records: RecordStore, value: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # The words are rfc8785's.
        records.publish(KEY, value)
    assert records.get(KEY) is None


def test_files_of_other_names_are_passed_over(records: RecordStore) -> None:
    records.publish(KEY, VALUE)
    for name in ("ab/notes.txt", "ab/.nfs0001", f"ab/{OTHER}.json", f"cd/{OTHER}", "zz/x.json"):
        rewrite(records.root / "records" / name, b"")

    assert list(records.keys()) == [KEY]


def test_a_use_is_noted_without_changing_what_the_file_is(records: RecordStore) -> None:
    records.publish(KEY, VALUE)
    before = records.stamp(KEY)

    records.touch(KEY, 1_000_000_000.0)
    records.touch(OTHER, 1_000_000_000.0)

    after = records.stamp(KEY)
    assert before is not None
    assert after is not None
    assert after.used == 1_000_000_000.0
    assert (after.inode, after.size_bytes) == (before.inode, before.size_bytes)
    assert records.stamp(OTHER) is None


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
def test_a_system_that_does_not_let_us_look_is_an_error_and_no_miss(
    records: RecordStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    records.publish(KEY, VALUE)

    monkeypatch.setattr(os, "open", raising(code))
    with pytest.raises(StoreError, match="cannot read"):
        records.get(KEY)


def test_a_name_that_went_stale_on_a_network_file_system_is_looked_up_again(
    records: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.publish(KEY, VALUE)
    real, left = os.open, [errno.ESTALE, errno.EBUSY]

    def stale(path: str, *arguments: int) -> int:
        if left and path.endswith(".json"):
            raise OSError(left[0], os.strerror(left.pop(0)))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", stale)
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=lambda _: None))

    assert records.get(KEY) == VALUE
    assert left == []
