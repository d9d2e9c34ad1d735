"""Directories and object stores as remotes: one contract, tested on both; retries."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, MissingObjectError, RemoteError, StoreError
from aotgaudi.share.file_remotes import DirectoryRemote, ObjectStoreRemote
from aotgaudi.share.remote import Remote, TransientError
from aotgaudi.share.transfer import Retry
from aotgaudi.store.cas import ObjectStore, object_path
from aotgaudi.store.records import RecordStore, dump_record

DATA = bytes(range(256)) * 70_000  # 18 MB: several parts
DIGEST = Digest.of(DATA)
KEY = "c" * 64
NAMES = itertools.count()

Corrupt = Callable[[Digest, bytes], None]


@pytest.fixture(params=["directory", "memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    if request.param == "directory":
        return DirectoryRemote(tmp_path / "remote")
    return ObjectStoreRemote(f"memory://test{next(NAMES)}/prefix")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


def read(remote: Remote, digest: Digest, offset: int = 0) -> tuple[int, bytes]:
    with remote.read(digest, offset) as download:
        return download.offset, b"".join(download.chunks)


def test_an_object_comes_back_from_any_byte_on(remote: Remote, file: Path) -> None:
    assert not remote.has(DIGEST)
    remote.put(DIGEST, file)

    assert remote.has(DIGEST)
    assert not remote.has(Digest(DIGEST.sha256, DIGEST.size_bytes + 1))
    for offset in (0, 1, 8 << 20, len(DATA) - 1, len(DATA)):
        assert read(remote, DIGEST, offset) == (offset, DATA[offset:])


def test_an_empty_object_is_an_object(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    remote.put(Digest.of(b""), tmp_path / "empty")

    assert remote.has(Digest.of(b""))
    assert read(remote, Digest.of(b"")) == (0, b"")


def test_what_is_not_there_is_missing(remote: Remote) -> None:
    with pytest.raises(MissingObjectError, match="has no object"):
        read(remote, DIGEST)
    assert remote.get_record(KEY) is None


def test_a_file_that_is_not_its_digest_is_not_stored_as_it(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * len(DATA))

    with pytest.raises(CorruptError, match="is not object"):
        remote.put(DIGEST, tmp_path / "other")
    assert not remote.has(DIGEST)


def test_a_record_comes_back_and_a_later_one_takes_its_place(remote: Remote) -> None:
    first, second = dump_record(KEY, {"a": 1}), dump_record(KEY, {"a": 2})
    remote.put_record(KEY, first, [])
    assert remote.get_record(KEY) == first
    remote.put_record(KEY, second, [])
    assert remote.get_record(KEY) == second


def test_many_writers_of_one_object_leave_it_whole(remote: Remote, file: Path) -> None:
    threads = [threading.Thread(target=remote.put, args=(DIGEST, file)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert read(remote, DIGEST) == (0, DATA)


# Directories


def test_a_directory_is_laid_out_as_a_store(tmp_path: Path, file: Path) -> None:
    remote = DirectoryRemote(tmp_path / "remote")
    data = dump_record(KEY, {"a": 1})
    remote.put(DIGEST, file)
    remote.put_record(KEY, data, [])

    assert ObjectStore(tmp_path / "remote").read(DIGEST) == DATA
    assert RecordStore(tmp_path / "remote").get(KEY) == {"a": 1}
    found = {
        str(path.relative_to(tmp_path / "remote"))
        for path in (tmp_path / "remote").rglob("*")
        if path.is_file()
    }
    assert found == {
        f"objects/sha256/{DIGEST.sha256[:2]}/{DIGEST.sha256}",
        f"records/cc/{KEY}.json",
    }


@pytest.mark.parametrize("kind", ["symlink", "FIFO", "directory"])
def test_only_regular_files_are_read(tmp_path: Path, file: Path, kind: str) -> None:
    remote = DirectoryRemote(tmp_path / "remote")
    for path in (object_path(remote.root, DIGEST), RecordStore(remote.root).path(KEY)):
        path.parent.mkdir(parents=True)
        if kind == "symlink":
            path.symlink_to(file)
        elif kind == "FIFO":
            os.mkfifo(path)
        else:
            path.mkdir()

    assert not remote.has(DIGEST)
    with pytest.raises((MissingObjectError, RemoteError)):
        read(remote, DIGEST)
    with pytest.raises(RemoteError):
        remote.get_record(KEY)


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE]
)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_refusal_of_the_system_is_one_line_and_leaves_nothing(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    remote = DirectoryRemote(tmp_path / "remote")
    remote.put_record("d" * 64, dump_record("d" * 64, {}), [])
    real = getattr(os, call)

    def refuse(path: object, *arguments: object, **options: object) -> object:
        if call != "open" or "remote/tmp" in str(path):
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **options)

    for action in (
        lambda: remote.put(DIGEST, file),
        lambda: remote.put_record(KEY, dump_record(KEY, {}), []),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(StoreError) as caught:
                action()
        assert "\n" not in str(caught.value)
        assert os.strerror(code) in str(caught.value)
    assert not remote.has(DIGEST)
    assert remote.get_record(KEY) is None
    assert not list((tmp_path / "remote" / "tmp").iterdir())


# Object stores


class Failing:
    """A file system that fails as it is told."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Callable[..., object]:
        def fail(*_: object, **__: object) -> object:
            raise self.error

        return fail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("slow"), TransientError),
        (OSError(errno.EIO, "broken"), TransientError),
        (RuntimeError("what libraries raise"), TransientError),
        (PermissionError("Forbidden"), RemoteError),
        (ImportError("no module"), RemoteError),
        (OSError("An error occurred (SignatureDoesNotMatch)"), RemoteError),
        (FileNotFoundError("The specified bucket does not exist"), RemoteError),
    ],
)
def test_errors_of_a_file_system_are_ours(file: Path, error: Exception, kind: type[Exception]) -> None:
    remote = ObjectStoreRemote("memory://failing")
    remote._files = Failing(error)

    with pytest.raises(RemoteError) as caught:
        remote.put(DIGEST, file)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("memory://failing: ")


def test_a_password_in_an_error_is_not_repeated(file: Path) -> None:
    remote = ObjectStoreRemote("memory://me:secret@host/x")
    remote._files = Failing(RuntimeError("cannot reach https://me:secret@host/x\nat all"))

    with pytest.raises(TransientError) as caught:
        remote.put(DIGEST, file)
    assert "secret" not in str(caught.value) + remote.label
    assert "\n" not in str(caught.value)


def test_a_huge_record_is_not_fetched() -> None:
    remote = ObjectStoreRemote(f"memory://test{next(NAMES)}")
    remote.put_record(KEY, bytes((16 << 20) + 1), [])

    with pytest.raises(RemoteError, match="at most 16777216 are read"):
        remote.get_record(KEY)


# Retries


def test_waits_grow_and_end() -> None:
    waits: list[float] = []

    def fail() -> None:
        raise TransientError("busy")

    with pytest.raises(TransientError, match="busy"):
        Retry(num_attempts=8, sleep=waits.append).call(fail)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0]


def test_what_is_final_is_not_tried_again() -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise RemoteError("never")

    with pytest.raises(RemoteError, match="never"):
        Retry(sleep=lambda _: None).call(fail)
    assert calls == [1]


def test_a_remote_may_ask_for_time_and_gets_a_bounded_one() -> None:
    waits: list[float] = []
    errors = iter([TransientError("", 3.0), TransientError("", 1e9), TransientError("", 0.0)])

    def fail_thrice() -> str:
        for error in errors:
            raise error
        return "done"

    assert Retry(sleep=waits.append).call(fail_thrice) == "done"
    assert waits == [3.0, 20.0, 2.0]
