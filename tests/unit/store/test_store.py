"""The store as a whole: made once, by many; refused where it cannot be used; one builder a unit."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.errors import StoreError
from aotgaudi.store.fsck import check_store
from aotgaudi.store.store import STORE_FORMAT, Root, Store
from tests.unit.failing import raising

KEY = "ab" * 32


def test_a_store_is_made_and_opened_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "a" / "store")
    digest = store.objects.put_bytes(b"data")
    store.actions.put(KEY, {"object": str(digest)})

    again = Store.open(tmp_path / "a" / "store", create=False)

    assert again.objects.read(digest) == b"data"
    assert again.actions.get(KEY) == {"object": str(digest)}
    assert (again.root / "format").read_text() == f"{STORE_FORMAT}\n"


def test_a_missing_store_is_not_made_unasked(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        Store.open(tmp_path / "store", create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_other_things_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")

    with pytest.raises(StoreError, match="is not a store"):
        Store.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("aotgaudi.store/9\n")

    with pytest.raises(StoreError, match=r"has format 'aotgaudi.store/9' \(this aotgaudi reads"):
        Store.open(tmp_path)


def test_an_interrupted_making_is_finished(tmp_path: Path) -> None:
    """The makers before us died after making directories, or are still writing ``format``."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / ".format.x1y2.tmp").write_text("")

    assert Store.open(tmp_path).root == tmp_path


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_store_that_cannot_be_written_to_is_refused_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    Store.open(tmp_path)

    monkeypatch.setattr(os, "open", raising(code))
    with pytest.raises(StoreError, match=f"store at {tmp_path} is not writable: .*{os.strerror(code)}"):
        Store.open(tmp_path)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")

    with pytest.raises(StoreError, match="is not writable"):
        Store.open(tmp_path / "store")


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.open(Path("store"))
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")

    store.actions.put(KEY, {})

    assert (tmp_path / "store" / "records" / KEY[:2] / f"{KEY}.json").exists()


_HOLD = """
import sys
from pathlib import Path
from aotgaudi.store.store import Store
with Store.open(Path(sys.argv[1])).locks.try_unit(sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path), KEY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with store.locks.try_unit(KEY) as is_free:
            assert not is_free, "the holder lives"

        holder.kill()
        holder.wait(10)
        with store.locks.try_unit(KEY) as is_free:
            assert is_free


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_lets_everybody_in_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """A lock that is only a file would outlive its holder; a unit that is compiled twice is no error."""
    store = Store.open(tmp_path)

    monkeypatch.setattr(fcntl, "flock", raising(code))
    with store.locks.try_unit(KEY), store.locks.try_unit(KEY) as is_held, store.in_use():
        assert is_held

    assert "the file system has no locks" in caplog.text


def test_a_lock_that_cannot_be_had_for_another_reason_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path)

    monkeypatch.setattr(fcntl, "flock", raising(errno.EIO))
    with pytest.raises(StoreError, match=r"cannot lock .*Input/output error"), store.locks.try_unit(KEY):
        pass


def test_trying_does_not_wait(tmp_path: Path) -> None:
    store = Store.open(tmp_path)

    with (
        store.locks.try_unit(KEY),
        store.locks.try_unit(KEY) as second,
        store.locks.try_unit("cd" * 32) as other,
    ):
        assert (second, other) == (False, True)
    with store.locks.try_unit(KEY) as later:
        assert later


def test_a_lock_file_that_is_removed_under_its_holder_keeps_nobody_out_for_ever(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with store.locks.try_unit(KEY):
        (tmp_path / "locks" / f"{KEY}.lock").unlink()

    with store.locks.try_unit(KEY) as is_held:
        assert is_held


def test_the_lock_is_freed_by_an_exception(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with pytest.raises(KeyError), store.locks.try_unit(KEY):
        raise KeyError

    with store.locks.try_unit(KEY) as is_free:
        assert is_free


@pytest.mark.parametrize("key", ["", "../evil", "a/b", "x" * 200, "a.b"])
def test_a_key_that_is_no_plain_name_is_refused(tmp_path: Path, key: str) -> None:
    store = Store.open(tmp_path)

    with pytest.raises(ValueError, match="not a unit key"), store.locks.try_unit(key):
        pass


_OPEN = """
import sys
from pathlib import Path
from aotgaudi.store.store import Store
sys.stdin.readline()
store = Store.open(Path(sys.argv[1]))
store.actions.put("%064d" % int(sys.argv[2]), {})
"""


@pytest.mark.process
def test_many_processes_make_one_store_at_once(tmp_path: Path) -> None:
    root = tmp_path / "store"
    makers = [
        subprocess.Popen([sys.executable, "-c", _OPEN, str(root), str(n)], stdin=subprocess.PIPE)
        for n in range(4)
    ]
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write(b"go\n")
        maker.stdin.close()

    assert [maker.wait() for maker in makers] == [0, 0, 0, 0]
    store = Store.open(root, create=False)
    assert list(store.actions) == [f"{n:064d}" for n in range(4)]


_DOCUMENTED = re.compile(
    r"format|objects/sha256/([0-9a-f]{2})/\1[0-9a-f]{62}|records/([0-9a-f]{2})/\2[0-9a-f]{62}\.json"
    r"|roots/[0-9A-Za-z_-][0-9A-Za-z._-]*\.json|index/[0-9a-f]{64}\.json|locks/([0-9A-Za-z_-]+\.lock|store)"
)


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    """docs/formats/store.md, as a regular expression; 0444 where it says so."""
    store = Store.open(tmp_path)
    digest = store.objects.put_bytes(b"data")
    bad = store.objects.put_bytes(b"bad")
    store.actions.put(KEY, {"object": str(digest)})
    store.roots.put(Root(name="prod-1.2", keys=frozenset({KEY}), objects=frozenset({digest})))
    with store.in_use(), store.locks.try_unit(KEY):
        store.remember([KEY], [], [digest])
    store.objects.path(bad).chmod(0o644)
    store.objects.path(bad).write_bytes(b"BAD")
    check_store(store)

    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}

    assert [name for name in files if not _DOCUMENTED.fullmatch(name)] == []
    assert {name.split("/")[0] for name in files} == {
        "format", "objects", "records", "roots", "index", "locks"
    }  # fmt: skip
    assert all(
        stat.S_IMODE(path.stat().st_mode) == 0o444
        for name, path in files.items()
        if name[:3] in ("obj", "rec")
    )
    assert (tmp_path / "format").read_bytes() == b"aotgaudi.store/1\n"
