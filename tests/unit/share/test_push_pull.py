"""A bundle goes to a remote and comes back; what is interrupted goes on; what is bad never appears."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.signing import Signing, generate_key, load_signing_key
from aotgaudi.bundle.trust import SignaturePolicy, TrustPolicy
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, MissingObjectError, RemoteError, StoreError, UntrustedError
from aotgaudi.share.file_remotes import DirectoryRemote
from aotgaudi.share.push_pull import pull_bundle, push_bundle
from aotgaudi.share.remote import Download, Pointer
from aotgaudi.share.transfer import Conduct, Retry, Sources
from aotgaudi.store.cas import object_path
from tests.unit.bundle.conftest import Sealed
from tests.unit.failing import CALLS, fail_each


class Counting(DirectoryRemote):
    """A directory that counts its reads, and stops serving after some."""

    num_reads = 0
    most_reads = 1 << 30

    @contextlib.contextmanager
    def read(self, digest: Digest, offset: int = 0) -> Iterator[Download]:
        if self.num_reads >= self.most_reads:
            raise RemoteError("enough")
        self.num_reads += 1
        with super().read(digest, offset) as download:
            yield download


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def conduct(warnings: list[str]) -> Conduct:
    return Conduct(Retry(sleep=lambda _: None), 1, warn=warnings.append)


@pytest.fixture
def remote(sealed: Sealed, tmp_path: Path, conduct: Conduct) -> Counting:
    remote = Counting(tmp_path / "remote")
    push_bundle(sealed.open(), remote, "latest", conduct)
    return remote


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in (root, *root.rglob("*"))
    }


def pull(remote: DirectoryRemote, out: Path, conduct: Conduct, **options: TrustPolicy) -> Bundle:
    return pull_bundle(Sources([remote], conduct), "latest", out, **options)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_a_bundle_comes_back_to_the_byte_and_the_mode(
    sealed: Sealed, remote: Counting, conduct: Conduct, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        pulled = pull(remote, tmp_path / "deep" / "out", conduct)
    finally:
        os.umask(before)

    assert tree(tmp_path / "deep" / "out") == tree(sealed.path)
    assert verify_bundle(pulled).is_intact
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_how_much_there_is_is_told(sealed: Sealed, remote: Counting, tmp_path: Path) -> None:
    expected: list[int] = []
    done: list[int] = []
    conduct = Conduct(num_threads=1, advance=done.append)

    pull_bundle(Sources([remote], conduct), "latest", tmp_path / "out", expect=expected.append)

    assert expected == [sealed.open().index.counts.object_bytes] == [sum(done)]


def test_an_interrupted_pull_goes_on(
    sealed: Sealed, remote: Counting, conduct: Conduct, tmp_path: Path
) -> None:
    remote.most_reads = 5  # The documents, and two objects.
    with pytest.raises(RemoteError, match="enough"):
        pull(remote, tmp_path / "out", conduct)
    assert not (tmp_path / "out").exists()

    remote.most_reads = 1 << 30
    pull(remote, tmp_path / "out", conduct)

    assert remote.num_reads == len(sealed.open().index.objects) + 3
    assert tree(tmp_path / "out") == tree(sealed.path)


def test_what_an_interrupted_pull_left_is_verified_again(
    sealed: Sealed, remote: Counting, conduct: Conduct, tmp_path: Path
) -> None:
    remote.most_reads = 5
    with pytest.raises(RemoteError):
        pull(remote, tmp_path / "out", conduct)
    staging = tmp_path / ".out.pull"
    for path in (path for path in staging.rglob("*") if path.is_file()):
        path.chmod(0o644)
        path.write_bytes(b"x" * path.stat().st_size)
    (staging / "objects" / "sha256" / "zz").mkdir(exist_ok=True)
    (staging / "objects" / "sha256" / "zz" / "stray").touch()
    (staging / "notes.txt").touch()
    (staging / "link").symlink_to("/etc")

    remote.most_reads = 1 << 30
    pull(remote, tmp_path / "out", conduct)

    assert tree(tmp_path / "out") == tree(sealed.path)


def test_an_older_bundle_is_replaced_and_lends_what_it_has(
    sealed: Sealed, remote: Counting, conduct: Conduct, tmp_path: Path
) -> None:
    pull(remote, tmp_path / "out", conduct)
    remote.num_reads = 0
    damaged = object_path(tmp_path / "out", sealed.digests["layer.so"])
    damaged.chmod(0o644)
    damaged.write_bytes(b"x" * sealed.digests["layer.so"].size_bytes)

    pull(remote, tmp_path / "out", conduct)

    assert remote.num_reads == 3 + 1  # The documents, and what was damaged.
    assert tree(tmp_path / "out") == tree(sealed.path)


def test_two_remotes_of_which_one_is_bad_give_the_bundle(
    sealed: Sealed, remote: Counting, conduct: Conduct, tmp_path: Path, warnings: list[str]
) -> None:
    bad = DirectoryRemote(tmp_path / "bad")
    shutil.copytree(remote.root, bad.root)
    for path in (path for path in (bad.root / "objects").rglob("*") if path.is_file()):
        path.chmod(0o644)
        path.write_bytes(b"x" * path.stat().st_size)

    pull_bundle(Sources([bad, remote], conduct), "latest", tmp_path / "out")

    assert tree(tmp_path / "out") == tree(sealed.path)
    assert len(warnings) == len(sealed.open().index.objects) + 3


@pytest.mark.parametrize("pointer", [b"{}", Pointer(index=Digest.of(b"gone")).dumps(), None])
def test_a_remote_with_a_bad_name_does_not_hide_the_good_one(
    sealed: Sealed,
    remote: Counting,
    conduct: Conduct,
    tmp_path: Path,
    warnings: list[str],
    pointer: bytes | None,
) -> None:
    bad = DirectoryRemote(tmp_path / "bad")
    (tmp_path / "bad" / "bundles").mkdir(parents=True)
    if pointer is not None:
        (tmp_path / "bad" / "bundles" / "latest").write_bytes(pointer)

    pull_bundle(Sources([bad, remote], conduct), "latest", tmp_path / "out")

    assert tree(tmp_path / "out") == tree(sealed.path)
    assert len(warnings) == (pointer is not None)


def test_what_no_remote_has_is_an_error_and_leaves_no_bundle(
    sealed: Sealed, remote: Counting, conduct: Conduct, tmp_path: Path
) -> None:
    path = object_path(remote.root, sealed.digests["layer.so"])
    path.unlink()
    with pytest.raises(MissingObjectError, match="has no object"):
        pull(remote, tmp_path / "out", conduct)
    path.write_bytes(b"x" * sealed.digests["layer.so"].size_bytes)
    with pytest.raises(CorruptError, match="not what its digest says"):
        pull(remote, tmp_path / "out", conduct)
    with pytest.raises(RemoteError, match="no bundle 'v9' at"):
        pull_bundle(Sources([remote], conduct), "v9", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file", "other"])
def test_what_is_not_ours_is_not_replaced(
    remote: Counting, conduct: Conduct, tmp_path: Path, place: str
) -> None:
    out = tmp_path / "out"
    if place == "file":
        out.touch()
    else:
        out.mkdir()
        (out / "thesis.txt").touch()

    with pytest.raises(StoreError):
        pull(remote, out, conduct)
    assert out.is_file() or (out / "thesis.txt").exists()


def test_one_process_at_a_time_writes_a_bundle(remote: Counting, conduct: Conduct, tmp_path: Path) -> None:
    (tmp_path / ".out.pull").mkdir()
    descriptor = os.open(tmp_path / ".out.pull", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    with pytest.raises(StoreError, match="another process is writing"):
        pull(remote, tmp_path / "out", conduct)
    os.close(descriptor)
    pull(remote, tmp_path / "out", conduct)


@pytest.mark.parametrize("size_bytes", [1 << 40, 228 << 20], ids=["a TiB", "of 3,000,000 objects"])
def test_an_index_that_is_too_large_is_not_asked_for(
    remote: Counting, conduct: Conduct, tmp_path: Path, size_bytes: int
) -> None:
    remote.publish("latest", Pointer(index=Digest("0" * 64, size_bytes)), [])

    with pytest.raises(CorruptError, match=f"would have {size_bytes} bytes"):
        pull(remote, tmp_path / "out", conduct)


def test_what_does_not_fit_is_not_asked_for(
    sealed: Sealed, remote: Counting, conduct: Conduct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = sealed.open().index.counts.object_bytes
    num_documents = 3
    status = os.statvfs(tmp_path)

    def look(_: Path) -> os.statvfs_result:
        free_bytes = 10**9 if remote.num_reads < num_documents else size_bytes - 1
        return os.statvfs_result((status[0], 1, *status[2:4], free_bytes, *status[5:]))

    monkeypatch.setattr(os, "statvfs", look)
    with pytest.raises(StoreError, match=f"no room for {size_bytes} bytes"):
        pull(remote, tmp_path / "out", conduct)
    assert remote.num_reads == num_documents
    assert not (tmp_path / "out").exists()


def test_a_signature_travels_and_is_demanded_before_any_object(
    sealed: Sealed, conduct: Conduct, tmp_path: Path
) -> None:
    key = generate_key(tmp_path / "key.pem")
    other = generate_key(tmp_path / "other.pem")
    remote = Counting(tmp_path / "remote")
    push_bundle(sealed.open(), remote, "latest", conduct)
    trusted = TrustPolicy(signatures=SignaturePolicy(frozenset([key])))

    with pytest.raises(UntrustedError, match="is not signed"):
        pull(remote, tmp_path / "out", conduct, policy=trusted)
    assert remote.num_reads == 1, "the index alone"

    sealed.pack(signing=Signing((load_signing_key(tmp_path / "key.pem"),)))
    push_bundle(sealed.open(), remote, "latest", conduct)
    pulled = pull(remote, tmp_path / "out", conduct, policy=trusted)
    assert pulled.statement is not None
    assert tree(tmp_path / "out") == tree(sealed.path)

    with pytest.raises(UntrustedError):
        pull(
            remote,
            tmp_path / "no",
            conduct,
            policy=TrustPolicy(signatures=SignaturePolicy(frozenset([other]))),
        )
    assert not (tmp_path / "no").exists()


def test_an_unsigned_bundle_does_not_keep_the_signature_of_an_interrupted_pull(
    sealed: Sealed, remote: Counting, conduct: Conduct, tmp_path: Path
) -> None:
    (tmp_path / ".out.pull").mkdir()
    (tmp_path / ".out.pull" / "aotgaudi.signature.json").write_text("{}")

    pull(remote, tmp_path / "out", conduct)

    assert tree(tmp_path / "out") == tree(sealed.path)


def test_a_damaged_bundle_is_not_pushed(sealed: Sealed, conduct: Conduct, tmp_path: Path) -> None:
    sealed.object("layer.so").write_bytes(b"x" * sealed.digests["layer.so"].size_bytes)
    remote = DirectoryRemote(tmp_path / "remote")

    with pytest.raises(CorruptError):
        push_bundle(sealed.open(), remote, "latest", conduct)
    assert remote.resolve("latest") is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", CALLS)
def test_a_pull_in_which_one_call_fails_gives_the_bundle_or_one_line_and_goes_on(
    sealed: Sealed, remote: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    numbers = itertools.count()
    quiet = Conduct(Retry(sleep=lambda _: None), 1)

    def action() -> None:
        pull(remote, tmp_path / str(next(numbers)), quiet)

    failures = list(fail_each(monkeypatch, call, code, action))

    for number, error in enumerate(failures):
        out = tmp_path / str(number)
        if error is not None and not out.exists():
            pull(remote, out, quiet)
        assert tree(out) == tree(sealed.path)
    assert not list(tmp_path.glob(".*.pull"))
