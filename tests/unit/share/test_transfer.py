"""Many objects from several remotes, of which some are bad; what is half received; what is told of it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, MissingObjectError, RemoteError, StoreError
from aotgaudi.share.file_remotes import DirectoryRemote
from aotgaudi.share.remote import Download, TransientError
from aotgaudi.share.transfer import Conduct, Retry, Sources, in_threads, receive, send
from tests.unit.failing import raising

ITEMS = {Digest.of(data): data for data in (b"%d" % number * 5000 for number in range(20))}


class Remote(DirectoryRemote):
    """A directory that counts, and fails on demand."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.error: Exception | None = None
        self.num_reads = 0
        self.flips: set[Digest] = set()

    @contextlib.contextmanager
    def read(self, digest: Digest, offset: int = 0) -> Iterator[Download]:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        with super().read(digest, offset) as download:
            chunks = (
                (bytes([c[0] ^ 1]) + c[1:] for c in download.chunks)
                if digest in self.flips
                else download.chunks
            )
            yield Download(download.offset, chunks)

    def has(self, digest: Digest) -> bool:
        if self.error is not None:
            raise self.error
        return super().has(digest)


class Watch:
    """A conduct that nothing sleeps in, and what it was told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.num_bytes = 0
        self.lock = threading.Lock()
        self.conduct = Conduct(Retry(sleep=lambda _: None), 4, self.advance, self.warnings.append)

    def advance(self, num_bytes: int) -> None:
        with self.lock:
            self.num_bytes += num_bytes


@pytest.fixture
def watch() -> Watch:
    return Watch()


def filled(root: Path, items: Iterable[Digest] = ITEMS) -> Remote:
    remote = Remote(root)
    for digest in items:
        (root.parent / "source").write_bytes(ITEMS[digest])
        remote.put(digest, root.parent / "source")
    return remote


def receive_all(sources: Sources, root: Path) -> None:
    def one(digest: Digest) -> None:
        receive(
            digest,
            root / "part" / digest.sha256,
            root / digest.sha256,
            lambda file: sources.fill(digest, file),
        )

    sources.each(one, ITEMS)


def assert_all_there(root: Path) -> None:
    assert {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()} == {
        digest.sha256: data for digest, data in ITEMS.items()
    }
    assert list((root / "part").iterdir()) == []


def test_everything_comes_and_is_counted(tmp_path: Path, watch: Watch) -> None:
    receive_all(Sources([filled(tmp_path / "a")], watch.conduct), tmp_path / "out")

    assert_all_there(tmp_path / "out")
    assert watch.num_bytes == sum(map(len, ITEMS.values()))
    assert watch.warnings == []


@pytest.mark.parametrize("error", [RemoteError("a refuses"), TransientError("a is down")])
def test_a_remote_that_fails_is_warned_of_once_and_asked_no_more(
    tmp_path: Path, watch: Watch, error: RemoteError
) -> None:
    bad, good = filled(tmp_path / "a"), filled(tmp_path / "b")
    bad.error = error

    receive_all(Sources([bad, good], watch.conduct), tmp_path / "out")

    assert_all_there(tmp_path / "out")
    assert watch.warnings == [f"{error}; going on without this remote"]
    assert bad.num_reads <= 4 * 5  # What was under way in four threads.
    assert good.num_reads == len(ITEMS)


def test_bad_objects_come_from_the_other_remote(tmp_path: Path, watch: Watch) -> None:
    bad, good = filled(tmp_path / "a"), filled(tmp_path / "b")
    bad.flips = set(list(ITEMS)[:3])

    receive_all(Sources([bad, good], watch.conduct), tmp_path / "out")

    assert_all_there(tmp_path / "out")
    assert good.num_reads == len(watch.warnings) == 3
    assert all("not what its digest says" in line for line in watch.warnings)
    assert watch.num_bytes == sum(map(len, ITEMS.values()))


def test_what_one_remote_lacks_another_may_have(tmp_path: Path, watch: Watch) -> None:
    digests = list(ITEMS)
    remotes = [filled(tmp_path / "a", digests[:9]), filled(tmp_path / "b", digests[9:])]

    receive_all(Sources(remotes, watch.conduct), tmp_path / "out")

    assert_all_there(tmp_path / "out")
    assert watch.warnings == []


def test_half_of_an_object_from_a_bad_remote_does_not_spoil_the_good_one(
    tmp_path: Path, watch: Watch
) -> None:
    digest, data = next(iter(ITEMS.items()))
    (tmp_path / "part").write_bytes(b"x" * 100)
    sources = Sources([filled(tmp_path / "b")], watch.conduct)

    receive(digest, tmp_path / "part", tmp_path / "whole", lambda file: sources.fill(digest, file))

    assert (tmp_path / "whole").read_bytes() == data
    assert watch.num_bytes == len(data)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("corrupt", "missing", CorruptError),
        ("missing", "corrupt", CorruptError),
        ("missing", "missing", MissingObjectError),
        ("down", "missing", MissingObjectError),
        ("down", "down", RemoteError),
        ("down", "corrupt", CorruptError),
    ],
)
def test_what_nobody_has_intact_is_an_error_by_the_worst(
    tmp_path: Path, watch: Watch, first: str, second: str, expected: type[Exception]
) -> None:
    digest = next(iter(ITEMS))
    remotes = []
    for name, state in (("a", first), ("b", second)):
        remote = filled(tmp_path / name, [] if state == "missing" else ITEMS)
        remote.error = RemoteError("down") if state == "down" else None
        remote.flips = {digest} if state == "corrupt" else set()
        remotes.append(remote)
    sources = Sources(remotes, watch.conduct)

    with pytest.raises(expected) as caught:
        receive(digest, tmp_path / "part", tmp_path / "whole", lambda file: sources.fill(digest, file))
    assert type(caught.value) is expected
    assert not (tmp_path / "whole").exists()


def test_without_a_usable_remote_the_first_reason_is_given(tmp_path: Path, watch: Watch) -> None:
    bad = filled(tmp_path / "a")
    bad.error = RemoteError("no such host")
    sources = Sources([bad], watch.conduct)
    sources.require_usable()

    assert sources.ask(bad, lambda: bad.has(next(iter(ITEMS)))) is None
    with pytest.raises(RemoteError, match="no such host"):
        sources.require_usable()
    assert watch.warnings == []  # It is the only one: the error says it.


def test_an_object_that_is_there_is_not_received_and_a_damaged_one_is_replaced(
    tmp_path: Path, watch: Watch
) -> None:
    digest, data = next(iter(ITEMS.items()))
    remote = filled(tmp_path / "a")
    sources = Sources([remote], watch.conduct)

    def get() -> bool:
        return receive(digest, tmp_path / "p", tmp_path / "whole", lambda file: sources.fill(digest, file))

    assert get()
    assert not get()
    (tmp_path / "whole").chmod(0o644)
    (tmp_path / "whole").write_bytes(data[:-1])
    assert get()
    assert (tmp_path / "whole").read_bytes() == data
    assert remote.num_reads == 2


def test_two_receivers_of_one_object_fetch_it_once(tmp_path: Path, watch: Watch) -> None:
    digest, data = next(iter(ITEMS.items()))
    remote = filled(tmp_path / "a")
    sources = Sources([remote], watch.conduct)
    started = threading.Barrier(4)

    def get(_: int) -> bool:
        started.wait()
        return receive(digest, tmp_path / "p", tmp_path / "whole", lambda file: sources.fill(digest, file))

    assert sum(in_threads(get, range(4), 4)) == 1
    assert remote.num_reads == 1
    assert (tmp_path / "whole").read_bytes() == data


def test_after_an_error_nothing_is_begun_and_what_runs_is_stopped(tmp_path: Path, watch: Watch) -> None:
    begun = []
    sources = Sources([filled(tmp_path / "a")], watch.conduct)

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise RemoteError("first")
        for _ in range(1000):
            sources._advance(0)
            time.sleep(0.001)

    with pytest.raises(RemoteError, match="first"):
        sources.each(work, range(500))
    assert len(begun) < 100


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "ftruncate"])
def test_a_full_disk_is_one_line_and_leaves_what_can_be_continued(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    digest, data = next(iter(ITEMS.items()))
    sources = Sources([filled(tmp_path / "a")], watch.conduct)
    (tmp_path / "p").write_bytes(b"x" * len(data) if call == "ftruncate" else data[:100])

    def get() -> None:
        receive(digest, tmp_path / "p", tmp_path / "whole", lambda file: sources.fill(digest, file))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, raising(28))
        with pytest.raises(StoreError, match=f"No space left on device .{len(data)} bytes are needed"):
            get()
    assert not (tmp_path / "whole").exists()
    get()
    assert (tmp_path / "whole").read_bytes() == data


def test_only_what_is_lacking_is_sent(tmp_path: Path, watch: Watch) -> None:
    digests = list(ITEMS)
    remote = filled(tmp_path / "a", digests[:5])
    files = {}
    for digest, data in ITEMS.items():
        files[digest] = tmp_path / digest.sha256
        files[digest].write_bytes(data)

    assert send(remote, files, watch.conduct) == (15, sum(len(ITEMS[d]) for d in digests[5:]))
    assert send(remote, files, watch.conduct) == (0, 0)
    assert send(remote, files, watch.conduct, overwrite=True)[0] == 20
    assert watch.num_bytes == 3 * sum(map(len, ITEMS.values()))


def test_sending_a_damaged_file_fails(tmp_path: Path, watch: Watch) -> None:
    digest = next(iter(ITEMS))
    (tmp_path / "file").write_bytes(b"other")

    with pytest.raises(CorruptError):
        send(Remote(tmp_path / "a"), {digest: tmp_path / "file"}, watch.conduct)
