"""One remote: objects and records in a directory, in a file system of fsspec, and behind an HTTP server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, MissingObjectError, RemoteError, SpecError
from aotgaudi.share import remote as remote_module
from aotgaudi.share.remote import NoAnswerError, Remote, without_password
from aotgaudi.store.cas import ObjectStore, object_path
from aotgaudi.store.records import LARGEST_RECORD_BYTES
from tests.remotes import Place, faulty_place, http_server, place

__all__ = ["place"]

KEY = "ab" * 32
DATA = bytes(range(251)) * 40
DIGEST = Digest.of(DATA)
OBJECT = f"objects/sha256/{DIGEST.sha256[:2]}/{DIGEST.sha256}"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(remote_module, "_PART_BYTES", 1000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


@pytest.fixture(params=["directory", "file", "fsspec"])
def remote(request: pytest.FixtureRequest, tmp_path: Path, place: Place) -> Remote:
    urls = {
        "directory": f"{tmp_path}/a remote",
        "file": f"file://{tmp_path}/a%20remote",
        "fsspec": f"{place.url}/team",
    }
    return Remote(urls[request.param])


def read(remote: Remote, digest: Digest = DIGEST) -> bytes:
    return b"".join(remote.chunks(digest))


def test_what_was_put_is_there(remote: Remote, source: Path) -> None:
    assert not remote.has(DIGEST)
    assert remote.get_record(KEY) is None
    with pytest.raises(MissingObjectError):
        read(remote)

    remote.put(DIGEST, source)
    remote.put_record(KEY, b"one")
    remote.put_record(KEY, b"two")

    assert remote.has(DIGEST)
    assert not remote.has(Digest(DIGEST.sha256, DIGEST.size_bytes + 1))
    assert read(remote) == DATA
    assert remote.get_record(KEY) == b"two"


def test_a_directory_has_the_layout_of_a_store(tmp_path: Path, source: Path) -> None:
    remote = Remote(str(tmp_path / "there"))
    remote.put(DIGEST, source)
    remote.put_record(KEY, b"{}")

    path = object_path(tmp_path / "there", DIGEST)
    assert path.read_bytes() == DATA
    assert path.stat().st_mode & 0o777 == 0o444
    assert (tmp_path / "there/records/ab" / f"{KEY}.json").read_bytes() == b"{}"
    assert list((tmp_path / "there/tmp").iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_file_in_a_directory_is_not_there_or_an_error(tmp_path: Path, kind: str) -> None:
    path = object_path(tmp_path, DIGEST)
    path.parent.mkdir(parents=True)
    make = {
        "link": lambda: path.symlink_to("/dev/zero"),
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }
    make[kind]()

    with pytest.raises((RemoteError, MissingObjectError, CorruptError)):
        read(Remote(str(tmp_path)))


def test_a_read_only_server_without_ranges_gives_whole_objects(tmp_path: Path, source: Path) -> None:
    pytest.importorskip("aiohttp")
    there = Remote(str(tmp_path / "served"))
    there.put(DIGEST, source)
    there.put_record(KEY, b"{}")
    with http_server(tmp_path / "served") as url:
        remote = Remote(url)

        assert read(remote) == DATA
        assert remote.has(DIGEST)
        assert remote.get_record(KEY) == b"{}"
        assert remote.get_record("cd" * 32) is None
        with pytest.raises(MissingObjectError):
            read(remote, Digest.of(b"other"))


@given(data=st.binary(max_size=5000), stored=st.none() | st.binary(max_size=5000), flip=st.integers(0, 4999))
def test_whatever_a_remote_has_nothing_but_what_the_digest_names_is_stored(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, stored: bytes | None, flip: int
) -> None:
    digest = Digest.of(data)
    damaged = data[:flip] + bytes([data[flip] ^ 1]) + data[flip + 1 :] if flip < len(data) else data
    for content in (stored, damaged, data):
        objects = ObjectStore(tmp_path_factory.mktemp("store"))
        with faulty_place("any") as place:
            if content is not None:
                place.files[f"objects/sha256/{digest.sha256[:2]}/{digest.sha256}"] = content
            try:
                objects.put_chunks(digest, Remote(place.url).chunks(digest))
            except (CorruptError, MissingObjectError):
                assert not objects.has(digest)
                assert content != data
            else:
                assert objects.read(digest) == data


def test_an_object_that_never_ends_is_read_no_further_than_it_has_bytes(tmp_path: Path) -> None:
    def forever() -> Iterator[bytes]:
        while True:
            nonlocal num_chunks
            num_chunks += 1
            yield b"x" * 1000

    num_chunks, objects = 0, ObjectStore(tmp_path)

    with pytest.raises(CorruptError):
        objects.put_chunks(DIGEST, forever())

    assert num_chunks <= DIGEST.size_bytes // 1000 + 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_record_that_is_too_large_is_cut(place: Place) -> None:
    place.files[f"records/ab/{KEY}.json"] = bytes(LARGEST_RECORD_BYTES + 1000)

    data = Remote(place.url).get_record(KEY)

    assert data is not None
    assert len(data) == LARGEST_RECORD_BYTES + 1


def test_a_call_that_fails_is_repeated_once(place: Place) -> None:
    errors = [ConnectionError("reset"), OSError("again"), ConnectionError("reset")]

    def fail(*_: str) -> None:
        if errors:
            raise errors.pop(0)

    place.fault = fail
    remote = Remote(place.url)

    with pytest.raises(RemoteError, match="faulty://here: OSError: again"):
        remote.get_record(KEY)
    assert remote.get_record(KEY) is None
    assert len(place.answers) == 4


def test_a_refusal_is_not_repeated(place: Place) -> None:
    def refuse(*_: str) -> None:
        raise PermissionError("Access Denied")

    place.fault = refuse

    with pytest.raises(RemoteError, match="PermissionError: Access Denied"):
        Remote(place.url).get_record(KEY)
    assert len(place.answers) == 1


def test_a_remote_that_hangs_costs_a_bounded_time(place: Place) -> None:
    release = threading.Event()
    place.fault = lambda *_: release.wait(60) and None
    began = time.monotonic()

    with pytest.raises(NoAnswerError, match="has not answered in 0 s"):
        Remote(place.url, seconds=0.2).has(DIGEST)

    assert time.monotonic() - began < 10
    release.set()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("cache", "a directory is ./cache"),
        ("registry.example/team/cache", "a directory is ./registry"),
        ("", "is not a remote"),
        ("s4://bucket/x", "Protocol not known"),
        ("file://elsewhere/x", "names another machine"),
        ("s4://me:secret@bucket/x", "Protocol not known"),
    ],
)
def test_what_is_no_remote_is_the_users_error(url: str, words: str) -> None:
    with pytest.raises(SpecError, match="--remote") as caught:
        Remote(url)

    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def fail(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)

    with pytest.raises(SpecError, match=r"pip install 'aotgaudi\[s3\]'"):
        Remote("s3://bucket/x")
    with pytest.raises(SpecError, match="install the package that it names"):
        Remote("gs://bucket/x")


def test_passwords_are_not_shown() -> None:
    assert without_password("https://me:secret@host/x") == "https://host/x"
