"""What an archive may hold, and everything that it may not."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.format import MAX_INDEX_BYTES
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import canonical_json
from aotgaudi.errors import CorruptError
from aotgaudi.share.layer import unpack_layer
from aotgaudi.share.oci import BUNDLE_ROOT, LAYER_TYPES
from tests.unit.bundle.conftest import Sealed
from tests.unit.share.archives import Member, archive, directory, file, honest, unpack

INDEX = 3
"""Position of the index among the honest members, behind three directories."""


def outcome(data: bytes, root: Path) -> str:
    """The one line with which an archive is refused, or what is wrong with that."""
    before = sorted(root.parent.glob("*"))
    try:
        unpack(data, root)
    except CorruptError as error:
        left = [
            path for path in root.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())
        ]
        if sorted(root.parent.glob("*")) != sorted({*before, root}) or left:
            return f"wrote {left or 'outside'}"
        return "several lines" if "\n" in str(error) else str(error)
    return "unpacked"


def test_an_archive_of_a_bundle_gives_the_bundle(sealed: Sealed, tmp_path: Path) -> None:
    unpack(archive(honest(sealed)), tmp_path / "out")

    assert verify_bundle(open_bundle(tmp_path / "out")).is_intact
    modes = {
        path.stat().st_mode & 0o7777 for path in (tmp_path / "out" / "objects").rglob("*") if path.is_file()
    }
    assert modes == {0o444}


def hostile_members() -> dict[str, Member]:
    """Members that no bundle has, by what is wrong with them."""
    kinds = {
        "symlink": tarfile.SYMTYPE,
        "hard link": tarfile.LNKTYPE,
        "character device": tarfile.CHRTYPE,
        "block device": tarfile.BLKTYPE,
        "FIFO": tarfile.FIFOTYPE,
        "contiguous": tarfile.CONTTYPE,
        "GNU long name": tarfile.GNUTYPE_LONGNAME,
        "pax header": tarfile.XHDTYPE,
        "pax global header": tarfile.XGLTYPE,
        "sparse": tarfile.GNUTYPE_SPARSE,
    }
    names = {
        "absolute": "/etc/passwd",
        "absolute in the root": f"/{BUNDLE_ROOT}/manifest.json",
        "parent": f"{BUNDLE_ROOT}/../../../etc/passwd",
        "parent only": "..",
        "dot": f"./{BUNDLE_ROOT}/receipt.json",
        "double slash": f"{BUNDLE_ROOT}//receipt.json",
        "control character": f"{BUNDLE_ROOT}/a\x1b[31m",
        "new line": f"{BUNDLE_ROOT}/a\nb",
        "not ASCII": f"{BUNDLE_ROOT}/m\u0430nifest.json",
        "extra": f"{BUNDLE_ROOT}/extra",
        "another place": "opt/manifest.json",
        "no place": "manifest.json",
        "case of a name": f"{BUNDLE_ROOT}/Manifest.json",
        "another object": f"{BUNDLE_ROOT}/objects/sha256/00/{'0' * 64}",
        "whiteout": f"{BUNDLE_ROOT}/.wh..wh..opq",
    }
    return {
        **{
            kind: file(f"{BUNDLE_ROOT}/manifest.json", b"", type=number, linkname="/etc")
            for kind, number in kinds.items()
        },
        **{kind: file(name, b"x") for kind, name in names.items()},
        "directory elsewhere": directory("etc"),
        "directory twice": directory("opt"),
        "index twice": file(f"{BUNDLE_ROOT}/aotgaudi.bundle.json", b"{}"),
        "huge signature": file(f"{BUNDLE_ROOT}/aotgaudi.signature.json", b"x", size=1 << 30),
        "negative size": file(f"{BUNDLE_ROOT}/manifest.json", size=-1),
        "huge size": file(f"{BUNDLE_ROOT}/manifest.json", size=1 << 62),
    }


@pytest.mark.parametrize("position", [0, INDEX + 1, -1], ids=["first", "behind the index", "last"])
def test_a_hostile_member_is_refused(sealed: Sealed, tmp_path: Path, position: int) -> None:
    wrong = {}
    for name, member in hostile_members().items():
        members = honest(sealed)
        members.insert(position if position >= 0 else len(members), member)
        said = outcome(archive(members, form=tarfile.GNU_FORMAT), tmp_path / name)
        if not said.startswith("the layer is not that of a bundle: "):
            wrong[name] = said

    assert wrong == {}


def test_what_is_missing_doubled_or_of_another_size_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    members, wrong = honest(sealed), {}
    for number, (member, data) in enumerate(members):
        cases = {"twice": [*members, members[number]]}
        if member.isreg():
            rest = members[number + 1 :]
            cases["missing"] = [*members[:number], *rest]
            cases["shorter"] = [*members[:number], file(member.name, data[:-1]), *rest]
            cases["longer"] = [*members[:number], file(member.name, data + b"x"), *rest]
        for name, changed in cases.items():
            said = outcome(archive(changed), tmp_path / f"{name} {number}")
            if not said.startswith("the layer is not that of a bundle: "):
                wrong[f"{member.name} {name}"] = said

    assert wrong == {}


def test_the_index_must_be_first_and_one(sealed: Sealed, tmp_path: Path) -> None:
    members = honest(sealed)
    index = members[INDEX][0].name
    cases = {
        "last": archive([*members[:INDEX], *members[INDEX + 1 :], members[INDEX]]),
        "none": archive(members[:INDEX]),
        "nothing": b"",
        "junk": b"\xff" * 512,
        **{
            f"another {number}": archive([file(index, data), *members[INDEX + 1 :]])
            for number, data in enumerate((b"", b"{}", b"[" * 100_000, sealed.open().index_bytes + b" "))
        },
        "too large": archive([file(index, b"", size=MAX_INDEX_BYTES + 1)]),
    }

    said = {name: outcome(data, tmp_path / name) for name, data in cases.items()}
    assert {n: t for n, t in said.items() if not t.startswith("the layer is not that of a bundle: ")} == {}


def test_a_cut_archive_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    data = archive(honest(sealed), end=b"")
    lengths = [*range(0, len(data), 211), len(data) - 512]

    said = {length: outcome(data[:length], tmp_path / f"{length}") for length in lengths}
    assert {n: t for n, t in said.items() if not t.startswith("the layer is not that of a bundle: ")} == {}


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_bomb_ends_where_the_index_ends(sealed: Sealed, tmp_path: Path, kind: str) -> None:
    """128 MiB of a file that is too large, of directories, or behind the end, is neither written nor kept in memory."""
    members = honest(sealed)
    zeros = bytes(1 << 20)
    bombs = {
        "file": (
            archive(members[: INDEX + 1], end=b"") + _header(f"{BUNDLE_ROOT}/manifest.json", 128 << 20),
            zeros,
        ),
        "extension": (_header("x", 128 << 20, tarfile.XHDTYPE), zeros),
        "directories": (archive(members, end=b""), archive([directory("opt")], end=b"") * 2048),
    }
    for name, (head, block) in bombs.items():
        data = _compressed(kind, head, block, 128)
        (tmp_path / name).mkdir()
        tracemalloc.start()
        with pytest.raises(CorruptError):
            unpack_layer(io.BytesIO(data), LAYER_TYPES[kind], tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20
        assert sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file()) < 1 << 20


def test_memory_is_bounded_whatever_sizes_the_index_claims(sealed: Sealed, tmp_path: Path) -> None:
    index = sealed.open().index
    claimed = {**index.model_dump(mode="json", by_alias=True), "manifest": f"sha256:{'0' * 64}:{256 << 20}"}
    head = archive(
        [*honest(sealed)[:INDEX], file(f"{BUNDLE_ROOT}/aotgaudi.bundle.json", canonical_json(claimed))],
        end=b"",
    )
    head += _header(f"{BUNDLE_ROOT}/manifest.json", 256 << 20)
    data = _compressed("gzip", head, bytes(1 << 20), 100)

    tracemalloc.start()
    with pytest.raises(CorruptError, match="cannot be read: unexpected end of data"):
        unpack_layer(io.BytesIO(data), LAYER_TYPES["gzip"], tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def _compressed(kind: str, head: bytes, block: bytes, times: int) -> bytes:
    if kind == "gzip":
        file = io.BytesIO()
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as stream:
            stream.write(head)
            for _ in range(times):
                stream.write(block)
        return file.getvalue()
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    blocks = [compressor.compress(head), *(compressor.compress(block) for _ in range(times))]
    return b"".join([*blocks, compressor.flush()])


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_what_is_not_compressed_as_it_says_is_refused(sealed: Sealed, tmp_path: Path, kind: str) -> None:
    good = _compressed(kind, archive(honest(sealed)), b"", 0)
    for number, data in enumerate((b"", b"x", b"\x1f\x8b", bytes(100), good[: len(good) // 2])):
        (tmp_path / f"{number}").mkdir()
        with pytest.raises(CorruptError, match="the layer is not that of a bundle"):
            unpack_layer(io.BytesIO(data), LAYER_TYPES[kind], tmp_path / f"{number}")


def test_other_media_types_are_refused(tmp_path: Path) -> None:
    for media_type in ("application/vnd.oci.image.layer.v1.tar", "text/plain", ""):
        with pytest.raises(CorruptError, match="should be one of"):
            unpack_layer(io.BytesIO(b""), media_type, tmp_path)
