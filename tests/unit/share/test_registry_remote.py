"""Pushing to and pulling from a registry that works, that breaks off, and that lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import (
    CorruptError,
    ManifestError,
    MissingObjectError,
    RemoteError,
    SpecError,
    StoreError,
)
from aotgaudi.share.push_pull import pull_bundle, push_bundle
from aotgaudi.share.registry import RegistryRemote, record_tag
from aotgaudi.share.remote import Pointer, TransientError
from aotgaudi.share.transfer import Conduct, Sources, receive
from aotgaudi.store.records import dump_record
from tests.unit.bundle.conftest import Sealed
from tests.unit.share.conftest import remote_of
from tests.unit.share.fake_registry import FakeRegistry, Handler, cut_after, on, status, times

DATA = bytes(range(256)) * 20_000  # 5 MB: several chunks
KEY = "c" * 64


def receive_blob(remote: RegistryRemote, digest: Digest, folder: Path, conduct: Conduct) -> Path:
    sources = Sources((remote,), conduct)
    receive(digest, folder / "part", folder / "whole", lambda file: sources.fill(digest, file))
    return folder / "whole"


def test_a_bundle_comes_back_as_it_went(
    sealed: Sealed, remote: RegistryRemote, registry: FakeRegistry, conduct: Conduct, tmp_path: Path
) -> None:
    pushed = push_bundle(sealed.open(), remote, "v1", conduct)
    pulled = pull_bundle(Sources((remote,), conduct), "v1", tmp_path / "pulled")

    assert pushed.num_uploaded == pushed.num_objects == len(sealed.open().index.objects) + 3
    assert pulled.index_bytes == sealed.open().index_bytes
    assert sealed.path != pulled.path
    assert files(sealed.path) == files(pulled.path)


def files(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_a_second_push_uploads_nothing(
    sealed: Sealed, remote: RegistryRemote, registry: FakeRegistry, conduct: Conduct
) -> None:
    first = push_bundle(sealed.open(), remote, "v1", conduct)
    second = push_bundle(sealed.open(), remote, "v1", conduct)

    assert second.reference == first.reference
    assert (second.num_uploaded, second.uploaded_bytes) == (0, 0)


def test_an_artifact_lists_all_its_blobs_so_that_none_is_collected(
    sealed: Sealed, remote: RegistryRemote, registry: FakeRegistry, conduct: Conduct
) -> None:
    push_bundle(sealed.open(), remote, "v1", conduct)

    manifest = json.loads(registry.manifests["v1"])
    listed = {manifest["config"]["digest"], *(row["digest"] for row in manifest["layers"])}
    assert listed == set(registry.blobs)


def test_a_reference_with_a_digest_gives_that_bundle_whatever_the_tag_means_now(
    sealed: Sealed, remote: RegistryRemote, registry: FakeRegistry, conduct: Conduct, tmp_path: Path
) -> None:
    pushed = push_bundle(sealed.open(), remote, "v1", conduct)
    registry.manifests["v1"] = b"{}"
    pinned = remote_of(registry, pushed.reference.partition("/")[2])

    assert pull_bundle(Sources((pinned,), conduct), "any", tmp_path / "b").index == sealed.open().index
    with pytest.raises(SpecError, match="names a digest"):
        push_bundle(sealed.open(), pinned, "v1", conduct)


def test_a_pull_asks_for_a_tag_once_and_for_the_rest_by_digest(
    sealed: Sealed, remote: RegistryRemote, registry: FakeRegistry, conduct: Conduct, tmp_path: Path
) -> None:
    push_bundle(sealed.open(), remote, "v1", conduct)
    registry.log.clear()

    pull_bundle(Sources((remote_of(registry),), conduct), "v1", tmp_path / "b")

    assert registry.num_requests("GET", "/manifests/") == registry.num_requests("GET", "/manifests/v1$") == 1
    assert registry.num_requests("GET", "/blobs/sha256:") == len(sealed.open().index.objects) + 3


def test_a_manifest_whose_bytes_are_not_those_of_its_digest_is_refused(
    sealed: Sealed, remote: RegistryRemote, registry: FakeRegistry, conduct: Conduct, tmp_path: Path
) -> None:
    pushed = push_bundle(sealed.open(), remote, "v1", conduct)
    digest = pushed.reference.partition("@")[2]
    registry.manifests[digest] += b" "
    pinned = remote_of(registry, pushed.reference.partition("/")[2])

    with pytest.raises(CorruptError, match="came with other bytes"):
        pull_bundle(Sources((pinned,), conduct), "v1", tmp_path / "b")


def test_a_registry_that_names_another_digest_than_it_sends_is_refused(registry: FakeRegistry) -> None:
    lie = f"sha256:{'0' * 64}"
    registry.faults.append(on("GET", "/manifests/", status(200, b"{}", Docker_Content_Digest=lie)))

    with pytest.raises(CorruptError, match="names sha256:0000"):
        remote_of(registry).get_manifest("v1")


@pytest.mark.parametrize("code", [500, 502, 503, 504, 429])
def test_what_passes_is_tried_again(
    registry: FakeRegistry,
    remote: RegistryRemote,
    conduct: Conduct,
    waits: list[float],
    tmp_path: Path,
    code: int,
) -> None:
    digest = Digest.of(DATA)
    registry.add_blob(DATA)
    registry.faults.append(times(3, on("GET", "/blobs/", status(code))))

    assert receive_blob(remote, digest, tmp_path, conduct).read_bytes() == DATA
    assert waits == [0.5, 1.0, 2.0]


def test_attempts_are_bounded(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, waits: list[float], tmp_path: Path
) -> None:
    registry.faults.append(
        on("GET", "/blobs/", status(503, b'{"errors":[{"message":"too busy\\u001b[31m"}]}'))
    )

    with pytest.raises(TransientError, match="answered with 503 too busy"):
        receive_blob(remote, Digest.of(DATA), tmp_path, conduct)
    assert len(waits) == 4


def test_a_registry_is_waited_for_as_long_as_it_asks_within_bounds(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, waits: list[float]
) -> None:
    registry.faults.append(times(1, on("HEAD", "/blobs/", status(429, Retry_After="7"))))
    registry.faults.append(times(1, on("HEAD", "/blobs/", status(429, Retry_After="99999"))))

    assert not conduct.retry.call(lambda: remote.has(Digest.of(b"")))
    assert waits == [7.0, 20.0]


def test_a_transfer_that_breaks_off_is_continued_where_it_broke(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, tmp_path: Path
) -> None:
    registry.add_blob(DATA)
    registry.faults.append(times(2, on("GET", "/blobs/", cut_after(2_000_000))))

    assert receive_blob(remote, Digest.of(DATA), tmp_path, conduct).read_bytes() == DATA
    assert registry.ranges[-2:] == ["bytes=2000000-", "bytes=4000000-"]


def test_without_ranges_a_transfer_begins_anew(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, tmp_path: Path
) -> None:
    registry.has_ranges = False
    registry.add_blob(DATA)
    (tmp_path / "part").write_bytes(DATA[:3_000_000])

    assert receive_blob(remote, Digest.of(DATA), tmp_path, conduct).read_bytes() == DATA
    assert registry.ranges[-1] == "bytes=3000000-"


def test_a_later_run_continues_a_partial_file(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, tmp_path: Path
) -> None:
    registry.add_blob(DATA)
    registry.faults.append(on("GET", "/blobs/", cut_after(0)))
    (tmp_path / "part").write_bytes(DATA[:4_000_000])
    with pytest.raises(RemoteError):
        receive_blob(remote, Digest.of(DATA), tmp_path, conduct)
    assert (tmp_path / "part").read_bytes() == DATA[:4_000_000]
    registry.faults.clear()

    assert receive_blob(remote, Digest.of(DATA), tmp_path, conduct).read_bytes() == DATA
    assert registry.ranges[-1] == "bytes=4000000-"


@pytest.mark.parametrize("found", [b"x" * 1000, b"x" * len(DATA), b"x" * (len(DATA) + 1)])
def test_a_partial_file_of_something_else_is_begun_anew(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, tmp_path: Path, found: bytes
) -> None:
    registry.add_blob(DATA)
    (tmp_path / "part").write_bytes(found)

    assert receive_blob(remote, Digest.of(DATA), tmp_path, conduct).read_bytes() == DATA


@pytest.mark.parametrize(
    "sent", [DATA[:-1] + b"x", DATA + b"x", b"x" * len(DATA)], ids=["one byte", "one more", "all"]
)
def test_other_bytes_are_refused_and_leave_no_file(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, tmp_path: Path, sent: bytes
) -> None:
    digest = Digest.of(DATA)
    registry.blobs[f"sha256:{digest.sha256}"] = sent

    with pytest.raises(CorruptError, match="not what its digest says"):
        receive_blob(remote, digest, tmp_path, conduct)
    assert not (tmp_path / "whole").exists()
    assert registry.num_requests("GET", "/blobs/") == 1


def test_a_blob_that_is_shorter_at_the_server_is_not_waited_for(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, tmp_path: Path
) -> None:
    digest = Digest.of(DATA)
    registry.blobs[f"sha256:{digest.sha256}"] = DATA[:100]
    (tmp_path / "part").write_bytes(DATA[:1000])

    with pytest.raises(CorruptError, match="not what its digest says"):
        receive_blob(remote, digest, tmp_path, conduct)
    assert registry.num_requests("GET", "/blobs/") == 2


def test_a_missing_blob_is_said_to_be_missing(
    remote: RegistryRemote, conduct: Conduct, tmp_path: Path
) -> None:
    with pytest.raises(MissingObjectError, match="has no object"):
        receive_blob(remote, Digest.of(DATA), tmp_path, conduct)


def test_an_upload_that_fails_is_begun_anew_with_the_whole_body(
    registry: FakeRegistry, remote: RegistryRemote, conduct: Conduct, tmp_path: Path
) -> None:
    (tmp_path / "blob").write_bytes(DATA)
    registry.faults.append(times(1, on("PUT", "/blobs/", status(502))))

    conduct.retry.call(lambda: remote.put(Digest.of(DATA), tmp_path / "blob"))

    assert registry.blobs == {f"sha256:{Digest.of(DATA).sha256}": DATA}
    assert registry.num_requests("POST") == 2


def test_a_file_that_is_not_its_digest_is_not_stored(
    registry: FakeRegistry, remote: RegistryRemote, tmp_path: Path
) -> None:
    (tmp_path / "blob").write_bytes(b"other")

    with pytest.raises(RemoteError, match="provided digest did not match"):
        remote.put(Digest.of(b"bytes"), tmp_path / "blob")
    with pytest.raises(StoreError, match="has fewer than 6 bytes"):
        remote.put(Digest.of(b"longer"), tmp_path / "blob")
    with pytest.raises(StoreError, match="cannot read"):
        remote.put(Digest.of(b"longer"), tmp_path / "nothing")
    assert registry.blobs == {}


def test_an_empty_blob_can_be_stored(registry: FakeRegistry, remote: RegistryRemote, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    remote.put(Digest.of(b""), tmp_path / "empty")

    assert remote.has(Digest.of(b""))
    assert not remote.has(Digest.of(b"x"))


def test_an_upload_does_not_follow_to_nowhere(
    registry: FakeRegistry, remote: RegistryRemote, tmp_path: Path
) -> None:
    (tmp_path / "blob").write_bytes(b"x")
    registry.faults.append(on("POST", "", status(202)))

    with pytest.raises(RemoteError, match="did not say where it goes"):
        remote.put(Digest.of(b"x"), tmp_path / "blob")


def test_a_record_comes_back_and_keeps_its_objects(registry: FakeRegistry, remote: RegistryRemote) -> None:
    data, named = dump_record(KEY, {"artifact": "x"}), Digest.of(b"object")

    remote.put_record(KEY, data, [named])

    assert remote.get_record(KEY) == data
    manifest = json.loads(registry.manifests[record_tag(KEY)])
    assert [row["digest"] for row in manifest["layers"]] == [f"sha256:{named.sha256}"]
    assert remote.get_record("d" * 64) is None


def test_something_else_under_a_record_s_tag_is_no_record(
    registry: FakeRegistry, remote: RegistryRemote
) -> None:
    remote.publish("other", Pointer(index=Digest.of(b"index")), [])
    registry.manifests[record_tag(KEY)] = registry.manifests["other"]

    assert remote.get_record(KEY) == b""


def test_what_is_no_bundle_is_named(registry: FakeRegistry, remote: RegistryRemote) -> None:
    remote.put_record(KEY, dump_record(KEY, {}), [])
    registry.manifests["v1"] = registry.manifests[record_tag(KEY)]
    registry.manifests["many"] = b'{"schemaVersion":2,"manifests":[]}'
    registry.manifests["junk"] = b"[]"

    with pytest.raises(RemoteError, match="is no bundle"):
        remote.resolve("v1")
    with pytest.raises(RemoteError, match="of several platforms"):
        remote.resolve("many")
    with pytest.raises(RemoteError, match="manifest junk"):
        remote.resolve("junk")
    assert remote.resolve("none") is None


def test_too_many_objects_for_a_manifest_are_refused(remote: RegistryRemote) -> None:
    digests = [Digest(f"{number:064x}", 1) for number in range(30_000)]

    with pytest.raises(ManifestError, match="use `build image`"):
        remote.publish("v1", Pointer(index=Digest.of(b"")), digests)


def test_a_huge_manifest_is_not_read(registry: FakeRegistry, remote: RegistryRemote) -> None:
    registry.manifests["v1"] = b" " * (5 << 20)

    with pytest.raises(RemoteError, match="has more than 4194304 bytes"):
        remote.resolve("v1")


def test_connections_are_used_again(registry: FakeRegistry, remote: RegistryRemote) -> None:
    ports = set()

    def note(handler: Handler) -> bool:
        ports.add(handler.client_address[1])
        return False

    registry.faults.append(note)
    for number in range(5):
        RegistryRemote(remote.client).put_bytes(Digest.of(b"%d" % number), b"%d" % number)

    assert len(ports) == 1
