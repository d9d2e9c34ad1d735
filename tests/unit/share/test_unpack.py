"""What an archive may hold, and everything that it may not."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import canonical_json
from aotgaudi.errors import CorruptError
from aotgaudi.share.layer import MAX_INDEX_BYTES, unpack_bundle
from aotgaudi.share.oci import BUNDLE_ROOT
from tests.unit.bundle.conftest import Sealed
from tests.unit.share.archives import archive, directory, file, honest, unpack

INDEX = 3
"""Position of the index among the honest members, behind three directories."""


def refused(data: bytes, root: Path, match: str) -> None:
    root.mkdir()
    before = sorted(root.parent.rglob("*"))
    with pytest.raises(CorruptError, match=match) as caught:
        unpack(data, root)
    assert "\n" not in str(caught.value)
    outside = [path for path in root.parent.rglob("*") if root not in path.parents]
    assert sorted(outside) == before


def test_an_archive_of_a_bundle_gives_the_bundle(sealed: Sealed, tmp_path: Path) -> None:
    unpack(archive(honest(sealed)), tmp_path / "out")

    report = verify_bundle(open_bundle(tmp_path / "out"))
    assert report.is_intact
    modes = {
        path.stat().st_mode & 0o7777 for path in (tmp_path / "out" / "objects").rglob("*") if path.is_file()
    }
    assert modes == {0o444}


def test_what_tar_itself_has_written_is_read(sealed: Sealed, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as written:
        for member, data in honest(sealed):
            written.addfile(member, io.BytesIO(data))

    unpack(buffer.getvalue(), tmp_path / "out")

    assert open_bundle(tmp_path / "out").index == sealed.open().index


HOSTILE = {
    "absolute": (file("/etc/passwd", b"x"), "is an absolute path"),
    "absolute in the root": (file(f"/{BUNDLE_ROOT}/manifest.json", b"x"), "is an absolute path"),
    "parent": (file(f"{BUNDLE_ROOT}/../../../etc/passwd", b"x"), "leads out of the directory"),
    "parent only": (file("..", b"x"), "leads out of the directory"),
    "dot": (file(f"./{BUNDLE_ROOT}/receipt.json", b"x"), "is no plain path"),
    "double slash": (file(f"{BUNDLE_ROOT}//receipt.json", b"x"), "is no plain path"),
    "backslash": (file(f"{BUNDLE_ROOT}/a\\b", b"x"), "is no plain path"),
    "control character": (file(f"{BUNDLE_ROOT}/a\x1b[31m", b"x"), "is no plain path"),
    "new line": (file(f"{BUNDLE_ROOT}/a\nb", b"x"), "is no plain path"),
    "not ASCII": (file(f"{BUNDLE_ROOT}/m\u0430nifest.json", b"x"), "is no plain path"),
    "symlink": (
        file(f"{BUNDLE_ROOT}/manifest.json", type=tarfile.SYMTYPE, linkname="/etc"),
        "is a symbolic link",
    ),
    "symlink for a directory": (
        file(f"{BUNDLE_ROOT}/objects", type=tarfile.SYMTYPE, linkname="/tmp"),
        "is a symbolic link",
    ),
    "hard link": (
        file(f"{BUNDLE_ROOT}/receipt.json", type=tarfile.LNKTYPE, linkname="/etc/shadow"),
        "is a hard link",
    ),
    "character device": (file(f"{BUNDLE_ROOT}/x", type=tarfile.CHRTYPE), "is a character device"),
    "block device": (file(f"{BUNDLE_ROOT}/x", type=tarfile.BLKTYPE), "is a block device"),
    "FIFO": (file(f"{BUNDLE_ROOT}/x", type=tarfile.FIFOTYPE), "is a FIFO"),
    "contiguous": (file(f"{BUNDLE_ROOT}/x", type=tarfile.CONTTYPE), "is an entry of type"),
    "GNU long name": (
        file("././@LongLink", b"x" * 600, type=tarfile.GNUTYPE_LONGNAME),
        "is an entry of type",
    ),
    "pax header": (file("x", b"20 path=/etc/passwd\n", type=tarfile.XHDTYPE), "is an entry of type"),
    "pax global header": (file("x", b"", type=tarfile.XGLTYPE), "is an entry of type"),
    "sparse": (file("x", b"", type=tarfile.GNUTYPE_SPARSE), "is a sparse file"),
    "setuid": (file(f"{BUNDLE_ROOT}/receipt.json", b"x", mode=0o4755), "has mode 4755"),
    "setgid": (file(f"{BUNDLE_ROOT}/receipt.json", b"x", mode=0o2755), "has mode 2755"),
    "sticky": (file(f"{BUNDLE_ROOT}/receipt.json", b"x", mode=0o1755), "has mode 1755"),
    "another name": (file(f"{BUNDLE_ROOT}/extra", b"x"), "is not in the bundle's index"),
    "another place": (file("opt/manifest.json", b"x"), "is not in the bundle's index"),
    "case of a name": (file(f"{BUNDLE_ROOT}/Manifest.json", b"x"), "is not in the bundle's index"),
    "another object": (
        file(f"{BUNDLE_ROOT}/objects/sha256/00/{'0' * 64}", b"x"),
        "is not in the bundle's index",
    ),
    "whiteout": (file(f"{BUNDLE_ROOT}/.wh..wh..opq"), "is not in the bundle's index"),
    "directory elsewhere": (directory("etc"), "is no directory of a bundle"),
    "directory twice": (directory("opt"), "is there twice"),
    "index twice": (file(f"{BUNDLE_ROOT}/aotgaudi.bundle.json", b"{}"), "is there twice"),
    "huge signature": (file(f"{BUNDLE_ROOT}/aotgaudi.signature.json", b"x", size=1 << 30), "at most 1048576"),
    "directory with bytes": (
        file(f"{BUNDLE_ROOT}/objects/sha256", b"x", type=tarfile.DIRTYPE),
        "is no directory",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("position", [INDEX + 1, -1], ids=["behind the index", "last"])
def test_a_hostile_member_is_refused(sealed: Sealed, tmp_path: Path, name: str, position: int) -> None:
    member, reason = HOSTILE[name]
    members = honest(sealed)
    if name == "directory with bytes":
        members = [row for row in members if not row[0].name.endswith("objects/sha256")]
    members.insert(position if position > 0 else len(members), member)

    refused(archive(members), tmp_path / "out", reason)


@pytest.mark.parametrize("name", ["symlink", "FIFO", "absolute", "parent", "setuid", "pax header"])
def test_a_hostile_member_before_the_index_is_refused(sealed: Sealed, tmp_path: Path, name: str) -> None:
    member, reason = HOSTILE[name]

    refused(archive([member, *honest(sealed)]), tmp_path / "out", reason)


def test_every_missing_file_is_missed(sealed: Sealed, tmp_path: Path) -> None:
    members = honest(sealed)
    for number, (member, _) in enumerate(members):
        if member.isreg() and number != INDEX:
            refused(
                archive(members[:number] + members[number + 1 :]),
                tmp_path / f"{number}",
                "1 files are missing",
            )


def test_a_file_twice_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    members = honest(sealed)
    for number, row in enumerate(members):
        refused(archive([*members, row]), tmp_path / f"{number}", "is there twice")


def test_the_index_must_be_first(sealed: Sealed, tmp_path: Path) -> None:
    members = honest(sealed)
    members[INDEX], members[-1] = members[-1], members[INDEX]

    refused(archive(members), tmp_path / "out", "its first file is not the bundle's index")
    refused(archive(members[:INDEX]), tmp_path / "empty", "there is no bundle in it")
    refused(b"", tmp_path / "nothing", "a header cannot be read: empty header")


def test_an_index_that_is_none_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    members = honest(sealed)
    for number, data in enumerate((b"", b"{}", b"[" * 100_000, sealed.open().index_bytes + b" ")):
        members[INDEX] = file(members[INDEX][0].name, data)
        refused(archive(members), tmp_path / f"{number}", "bundle index")


def test_an_index_too_large_to_hold_is_refused_unread(sealed: Sealed, tmp_path: Path) -> None:
    members = honest(sealed)
    members[INDEX] = file(members[INDEX][0].name, b"", size=MAX_INDEX_BYTES + 1)

    refused(archive(members), tmp_path / "out", f"at most {MAX_INDEX_BYTES} are read")


@pytest.mark.parametrize("change", [b"", b"x", b"xy"], ids=["shorter", "other", "longer"])
def test_other_bytes_than_the_index_s_are_refused(sealed: Sealed, tmp_path: Path, change: bytes) -> None:
    members = honest(sealed)
    for number, (member, data) in enumerate(members):
        if member.isreg() and number > INDEX:
            changed = members.copy()
            changed[number] = file(member.name, data[:-1] + change)
            refused(archive(changed), tmp_path / f"{number}", "another one by the index|by the index")


@pytest.mark.parametrize("size", [-1, 1 << 40, 1 << 62])
def test_a_size_that_no_file_has_is_refused(sealed: Sealed, tmp_path: Path, size: int) -> None:
    manifest = file(f"{BUNDLE_ROOT}/manifest.json", size=size)
    data = archive([*honest(sealed)[: INDEX + 1], manifest], form=tarfile.GNU_FORMAT)

    refused(data, tmp_path / "out", "negative size" if size < 0 else f"has {size} bytes")


def test_every_cut_is_noticed(sealed: Sealed, tmp_path: Path) -> None:
    data = archive(honest(sealed), end=bytes(512))
    for length in (*range(0, len(data), 211), *range(512, len(data), 512)):
        refused(data[:length], tmp_path / f"{length}", "the layer is not that of a bundle")


def test_what_follows_the_end_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    data = archive(honest(sealed))

    unpack(data + bytes(10_240), tmp_path / "padded")
    refused(data + b"x", tmp_path / "more", "behind its end")
    refused(data + bytes(2 << 20), tmp_path / "padding", "behind its end")


def test_a_header_that_is_none_behind_the_last_file_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    data = archive(honest(sealed), end=b"x" * 512 + bytes(1024))

    refused(data, tmp_path / "out", "a header cannot be read")


def test_padding_is_zeros(sealed: Sealed, tmp_path: Path) -> None:
    members = honest(sealed)
    member, data = members[INDEX]
    blocks = archive(members[:INDEX], end=b"") + member.tobuf(tarfile.USTAR_FORMAT) + data
    hidden = blocks + b"x" * (-len(data) % 512) + archive(members[INDEX + 1 :])

    refused(hidden, tmp_path / "out", "there is something between")


def test_a_header_that_is_none_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    data = bytearray(archive(honest(sealed)))
    data[0] ^= 1

    refused(bytes(data), tmp_path / "checksum", "a header cannot be read")
    refused(b"\xff" * 512, tmp_path / "junk", "a header cannot be read")


def test_a_link_in_the_place_of_a_file_is_not_written_through(sealed: Sealed, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "out" / "manifest.json").symlink_to(tmp_path / "victim")

    with pytest.raises(FileExistsError):
        unpack(archive(honest(sealed)), tmp_path / "out")
    assert (tmp_path / "victim").read_text() == "mine"


class Endless:
    """An archive that begins as a bundle's, and then goes on for ever."""

    def __init__(self, head: bytes, rest: bytes) -> None:
        self._head, self._rest, self.num_read = io.BytesIO(head), rest, 0

    def read(self, size: int) -> bytes:
        data = self._head.read(size) or self._rest[:size]
        self.num_read += len(data)
        return data


class Nowhere:
    """Takes files and keeps nothing."""

    def write(self, name: str, digest: object, chunks: object) -> None:
        for _ in chunks:  # type: ignore[attr-defined]
            pass


def test_memory_is_bounded_by_blocks_whatever_sizes_are_claimed(sealed: Sealed) -> None:
    size = 3 << 30
    index = sealed.open().index
    manifest = f"sha256:{'0' * 64}:{size}"
    data = canonical_json({**index.model_dump(mode="json", by_alias=True), "manifest": manifest})
    members = honest(sealed)[:INDEX]
    head = archive([*members, file(f"{BUNDLE_ROOT}/aotgaudi.bundle.json", data)], end=b"")
    huge = file(f"{BUNDLE_ROOT}/manifest.json", size=size)
    source = Endless(head + huge[0].tobuf(tarfile.USTAR_FORMAT), bytes(1 << 20))

    tracemalloc.start()
    with pytest.raises(CorruptError):
        unpack_bundle(source, Nowhere())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert source.num_read > size
    assert peak < 16 << 20


def test_nothing_is_left_to_names(sealed: Sealed, tmp_path: Path) -> None:
    unpack(archive(honest(sealed)), tmp_path / "out")

    names = {
        os.path.relpath(path, tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert names == {os.path.relpath(path, sealed.path) for path in sealed.path.rglob("*") if path.is_file()}
