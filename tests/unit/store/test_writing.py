"""Writing into the store: every step that fails, and every step at which the writer dies."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from aotgaudi import files
from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.store.scratch import sweep_temporary_files
from aotgaudi.store.store import Store

KEY = "ab" * 32
DATA = bytes(range(256)) * 40
DIGEST = Digest.of(DATA)
FAULTS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EMFILE)
CALLS = ("open", "write", "fchmod", "fsync", "rename", "link", "mkdir", "unlink", "close", "fstat", "read")
"""The system calls of `os` on the write path."""

Publish = Callable[[Store], object]
PUBLISHERS: dict[str, Publish] = {
    "object": lambda store: store.objects.put_bytes(DATA),
    "record": lambda store: store.actions.put(KEY, {"object": str(DIGEST)}),
}


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str, publish: Publish, store: Store) -> int:
    real, count = getattr(os, name), [0]

    def counting(*arguments: object, **options: object) -> object:
        count[0] += 1
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, counting)
    publish(store)
    monkeypatch.undo()
    return count[0]


def assert_sound(store: Store) -> None:
    """Nothing half-published: what is there is whole, and what is not there is absent."""
    for digest in store.objects.digests():
        store.objects.verify(digest)
    assert store.actions.get(KEY) in (None, {"object": str(DIGEST)})
    assert all(store.actions.get(key) is not None for key in store.actions)


@pytest.mark.parametrize("code", FAULTS, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("publish", PUBLISHERS.values(), ids=PUBLISHERS)
def test_a_call_that_fails_once_is_one_clean_error_or_none_and_the_next_try_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: Publish, name: str, code: int
) -> None:
    num_calls = count_calls(monkeypatch, name, publish, Store.open(tmp_path / "count"))
    for failing in range(num_calls):
        store = Store.open(tmp_path / f"{name}-{failing}")
        _fail_nth_call(monkeypatch, name, failing, code)
        try:
            publish(store)
        except StoreError as error:
            message = str(error)
            assert "\n" not in message
            assert str(store.root) in message
            assert os.strerror(code).lower() in message.lower()
        finally:
            monkeypatch.undo()

        assert_sound(store)
        publish(store)
        assert_sound(store)
        assert PUBLISHERS["object"](store) == DIGEST


def _fail_nth_call(monkeypatch: pytest.MonkeyPatch, name: str, failing: int, code: int) -> None:
    real, count = getattr(os, name), iter(range(10**6))

    def call(*arguments: object, **options: object) -> object:
        if next(count) == failing:
            if name == "close":
                real(*arguments)
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, call)


def die_at(nth: int, name: str, store: Store) -> int:
    """Publishes from a child process, which is killed at call number `nth` of ``os.<name>``. Returns its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # The test runner may have threads; they are not needed.
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    real, leave, count = getattr(os, name), os._exit, itertools.count()

    def call(*arguments: object, **options: object) -> object:
        if next(count) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    try:
        setattr(os, name, call)
        for publish in PUBLISHERS.values():
            publish(store)
        leave(0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        leave(1)


@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["open", "write", "fchmod", "fsync", "rename", "link", "mkdir", "unlink", "close"]
)
def test_a_writer_that_is_killed_at_any_step_leaves_a_sound_store_and_nothing_to_clean(
    tmp_path: Path, name: str
) -> None:
    died = 0
    for nth in range(30):
        root = tmp_path / f"{name}-{nth}"
        code = die_at(nth, name, Store.open(root))
        if code == 0:
            break
        died += 1
        assert code == -signal.SIGKILL

        store = Store.open(root)
        assert_sound(store)
        with store.in_use():
            assert list((root / "tmp").iterdir()) == []
            for publish in PUBLISHERS.values():
                publish(store)
        assert store.actions.get(KEY) == {"object": str(DIGEST)}
        assert store.objects.read(DIGEST) == DATA
    assert died, "the call was never made"


def test_a_rename_that_was_done_although_it_reports_an_error_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS, where the answer was lost and the call was sent again."""
    store, real = Store.open(tmp_path), os.rename

    def done_but_enoent(*arguments: Path) -> None:
        real(*arguments)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "rename", done_but_enoent)

    assert store.objects.put_bytes(DATA) == DIGEST
    assert store.objects.read(DIGEST) == DATA


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ESTALE])
def test_a_rename_that_is_refused_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store, waits = Store.open(tmp_path), list[float]()
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=waits.append))
    _fail_nth_call(monkeypatch, "rename", 0, code)

    store.objects.put_bytes(DATA)

    assert store.objects.read(DIGEST) == DATA
    assert waits == [0.01]


def test_a_device_that_returns_other_bytes_is_found_out_before_the_object_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = Store.open(tmp_path), os.write

    def lying(descriptor: int, data: memoryview) -> int:
        return real(descriptor, bytes(len(data)))

    monkeypatch.setattr(os, "write", lying)
    for publish in PUBLISHERS.values():
        with pytest.raises(StoreError, match="reads back differently"):
            publish(store)
    monkeypatch.undo()

    assert list(store.objects.digests()) == []
    assert list(store.actions) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_directories_are_never_writable_by_everybody(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        store = Store.open(tmp_path / "deep" / "store")
        for publish in PUBLISHERS.values():
            publish(store)
    finally:
        os.umask(previous)

    assert all(path.stat().st_mode & 0o002 == 0 for path in store.root.rglob("*") if path.is_dir())
    Store.open(store.root)


def test_a_temporary_file_that_was_swept_too_soon_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeper comes between the making of the file and the taking of its lock."""
    real, swept = files.fcntl.flock, list[int]()

    def sweep_first(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(1)
            monkeypatch.setattr(files.fcntl, "flock", real)
            assert sweep_temporary_files(tmp_path) == 1
        real(descriptor, operation)

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(files.fcntl, "flock", sweep_first)
    with files.temporary_file(tmp_path / "tmp") as file:
        file.write(b"data")
        assert file.path.read_bytes() == b"data"
    assert swept


def test_a_store_is_opened_while_another_builder_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe for writing is a temporary file like any other: a sweep in between is no refusal."""
    Store.open(tmp_path)
    real, swept = files.fcntl.flock, list[int]()

    def sweep_after(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        if not swept:
            swept.append(1)
            sweep_temporary_files(tmp_path)

    monkeypatch.setattr(files.fcntl, "flock", sweep_after)

    assert Store.open(tmp_path).root == tmp_path
    assert swept
