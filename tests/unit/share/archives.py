"""Archives of bundles, honest and not: made member by member, with whatever header is asked for."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from aotgaudi.share.layer import unpack_layer
from aotgaudi.share.oci import BUNDLE_ROOT, LAYER_TYPES
from tests.unit.bundle.conftest import Sealed

Member = tuple[tarfile.TarInfo, bytes]


def honest(sealed: Sealed) -> list[Member]:
    """The members of the bundle's archive, as ours are written."""
    paths = sorted(path for path in sealed.path.rglob("*"))
    names = [f"{BUNDLE_ROOT}/{path.relative_to(sealed.path).as_posix()}" for path in paths]
    parents = [directory(name) for name in ("opt", "opt/aotgaudi", BUNDLE_ROOT)]
    members = [
        directory(name) if path.is_dir() else file(name, path.read_bytes())
        for name, path in sorted(zip(names, paths, strict=True))
    ]
    return [*parents, *members]


def file(name: str, data: bytes = b"", **header: object) -> Member:
    member = tarfile.TarInfo(name)
    member.mode, member.size = 0o644, len(data)
    for key, value in header.items():
        setattr(member, key, value)
    return member, data


def directory(name: str) -> Member:
    return file(name, type=tarfile.DIRTYPE, mode=0o755)


def archive(
    members: Iterable[Member], *, form: int = tarfile.USTAR_FORMAT, end: bytes = bytes(1024)
) -> bytes:
    blocks = []
    for member, data in members:
        blocks += [member.tobuf(form), data, bytes(-len(data) % 512)]
    return b"".join([*blocks, end])


def unpack(data: bytes, root: Path) -> None:
    root.mkdir(exist_ok=True)
    unpack_layer(io.BytesIO(gzip.compress(data, 1)), LAYER_TYPES["gzip"], root)


def files(root: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and mode of every file under `root`, by relative name."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode & 0o7777)
        for path in root.rglob("*")
        if path.is_file()
    }
