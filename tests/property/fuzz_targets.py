"""What is fed to every parser that reads what others have written, and what must hold whatever that is.

A target is a strategy of inputs and a check. An input is a valid document or archive that was changed in bytes, or in
structure, or one that a hostile grammar made. A check fails on any exception that is none of the parser's own, on a
message of more than one line, on a path outside, and where something was accepted that is not what its writer writes.
"""

from __future__ import annotations

import copy
import functools
import gzip
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from hypothesis import strategies as st

from aotgaudi.backends.base import Target
from aotgaudi.bundle.format import BundleIndex, Counts, load_index
from aotgaudi.bundle.programs import load_program
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.bundle.signature import (
    Envelope,
    Signature,
    Statement,
    dump_envelope,
    load_envelope,
    load_statement,
)
from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.entries import DecodeEntry
from aotgaudi.errors import AotGaudiError
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest import manifest as codec
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.share.layer import unpack_layer
from aotgaudi.share.oci import (
    BUNDLE_INDEX,
    BUNDLE_ROOT,
    LAYER_TYPES,
    ImageIndex,
    ImageManifest,
    descriptor,
    dump_manifest,
    load_document,
)
from aotgaudi.store.records import dump_record, load_record
from aotgaudi.store.store import Root, load_root
from tests.specs import spec_of

SPEC = spec_of(limits={"max_model_len": 32, "num_blocks": 4}, target={"backend": "fake"})
KEY = "c" * 64


@dataclass(frozen=True)
class Fuzz:
    """A parser, what it is fed, and what must hold."""

    name: str
    inputs: st.SearchStrategy[bytes]
    check: Callable[[bytes], None]


@functools.cache
def targets() -> tuple[Fuzz, ...]:
    """Every target."""
    return (*_layers(), *_documents())


# Changed bytes, changed structure


@st.composite
def changed(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` with a few edits: a bit, a byte, a range removed, doubled, moved or replaced, the end cut off."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(0, 64))
        kind = draw(st.sampled_from(["bit", "byte", "remove", "double", "insert", "cut", "number"]))
        if kind == "bit" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and data:
            data[place] = draw(st.integers(0, 255))
        elif kind == "remove":
            del data[place : place + length]
        elif kind == "double":
            data[place:place] = data[place : place + length]
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=16))
        elif kind == "cut":
            del data[place:]
        else:
            data[place:place] = draw(
                st.sampled_from([b"9" * 30, b"-1", b"1e999", b"null", b'""', b"[" * 2000, b"\\ud800"])
            )
    return bytes(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def restructured(draw: st.DrawFn, valid: bytes) -> bytes:
    """A JSON document with a value replaced, removed, added or moved, written canonically where that is possible."""
    document = json.loads(valid)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(list(_places(document))))
        kind = draw(st.sampled_from(("replace", "remove", "add", "swap")))
        if kind == "replace":
            holder[key] = draw(JSON)
        elif kind == "remove":
            del holder[key]
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=8))] = draw(JSON)
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(list(_values(document)))))
        if not list(_places(document)):
            break
    try:
        return canonical_json(document)
    except (ValueError, RecursionError):
        return json.dumps(document).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _values(value: Any) -> Iterator[Any]:
    yield value
    for holder, key in _places(value):
        yield holder[key]


def documents_like(valid: bytes) -> st.SearchStrategy[bytes]:
    return (
        changed(valid)
        | restructured(valid)
        | st.binary(max_size=64)
        | JSON.map(lambda v: json.dumps(v).encode())
    )


# Documents


def _documents() -> Iterator[Fuzz]:
    receipt = _receipt()
    index = _index(receipt)
    manifest = codec.dumps(Manifest.of(SPEC))
    statement = Statement.of(index.dumps(), index, receipt)
    envelope = Envelope(b"payload", "type", (Signature("key", b"signature"), Signature("", b"other")))
    program = _program()
    root = Root(name="kept", keys=frozenset([KEY]), objects=frozenset([Digest.of(b"object")]))
    blob = descriptor(LAYER_TYPES["zstd"], Digest.of(b"object"), {BUNDLE_INDEX: f"sha256:{KEY}"})
    image = dump_manifest(blob, [blob], {})
    images = canonical_json({"schemaVersion": 2, "manifests": [json.loads(image)["config"]]})
    yield _strict("manifest", manifest, _read_manifest, None)  # People edit it: other forms are read.
    yield _strict("receipt", receipt.dumps(), load_receipt, Receipt.dumps)
    yield _strict("index", index.dumps(), load_index, BundleIndex.dumps)
    yield _strict("statement", statement.dumps(), load_statement, Statement.dumps)
    yield _strict("envelope", dump_envelope(envelope), load_envelope, None)
    yield _strict("program", program, lambda data: load_program(data, Digest.of(data)), None)
    yield _strict(
        "record",
        dump_record(KEY, {"a": [1, 2.5, "x"]}),
        lambda data: load_record(KEY, data),
        None,
        ValueError,
    )
    yield _strict("root", root.dumps(), lambda data: load_root("kept", data), Root.dumps)
    yield _strict(
        "image manifest", image, lambda data: load_document(data, ImageManifest, "image manifest"), None
    )
    yield _strict("image index", images, lambda data: load_document(data, ImageIndex, "image index"), None)


def _strict(
    name: str,
    valid: bytes,
    load: Callable[[bytes], Any],
    dump: Callable[[Any], bytes] | None,
    errors: type[Exception] = AotGaudiError,
) -> Fuzz:
    """A parser that takes what `dump` writes, and nothing else, unless that is None."""

    def check(data: bytes) -> None:
        try:
            value = load(data)
        except errors as error:
            assert_one_line(error)
            return
        if dump is not None:
            assert dump(value) == data

    load(valid)
    return Fuzz(name, documents_like(valid), check)


def assert_one_line(error: Exception) -> None:
    text = str(error)
    assert text
    assert len(text) < 4000
    if isinstance(error, AotGaudiError):
        assert text.isprintable(), repr(text)


def _read_manifest(data: bytes) -> Manifest:
    manifest = codec.loads(data)
    assert codec.loads(codec.dumps(manifest)) == manifest
    return manifest


# Archives


def check_layer(data: bytes) -> None:
    """A layer is refused in one line, or leaves the files of one whole bundle. The first byte says how it is compressed."""
    kind = LAYER_TYPES["gzip" if data[:1] == b"g" else "zstd"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        try:
            unpack_layer(io.BytesIO(data[1:]), kind, root)
        except AotGaudiError as error:
            assert_one_line(error)
            return
        finally:
            assert [path.name for path in Path(folder).iterdir()] == ["root"]
            assert not any(path.is_symlink() for path in root.rglob("*"))
        index = load_index((root / "aotgaudi.bundle.json").read_bytes())
        objects = {f"objects/sha256/{d.sha256[:2]}/{d.sha256}" for d in index.objects}
        found = {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
        assert found - {"aotgaudi.signature.json"} == objects | {
            "aotgaudi.bundle.json",
            "manifest.json",
            "receipt.json",
        }


def _layers() -> Iterator[Fuzz]:
    members = honest_members()
    valid = archive_of(members)
    packed = {b"g": gzip.compress(valid, mtime=0), b"z": zstandard.ZstdCompressor().compress(valid)}
    hostile = hostile_archives(members)
    for kind, data in packed.items():
        check_layer(kind + data)
    layers = st.one_of(
        *(changed(data).map(kind.__add__) for kind, data in packed.items()),
        (changed(valid) | hostile).map(lambda data: b"g" + gzip.compress(data, 1)),
        hostile.map(lambda data: b"z" + zstandard.ZstdCompressor(level=1).compress(data)),
    )
    yield Fuzz("layer", layers, check_layer)


Member = tuple[dict[str, Any], bytes]


def honest_members() -> list[Member]:
    """The members of a small bundle's archive: header fields, and content."""
    receipt = _receipt()
    index = _index(receipt).dumps()
    objects = {Digest.of(data).sha256: data for data in (b"artifact", _program())}
    files = {
        f"{BUNDLE_ROOT}/aotgaudi.bundle.json": index,
        f"{BUNDLE_ROOT}/aotgaudi.signature.json": b"{}",
        f"{BUNDLE_ROOT}/manifest.json": b"{}",
        **{f"{BUNDLE_ROOT}/objects/sha256/{name[:2]}/{name}": data for name, data in sorted(objects.items())},
        f"{BUNDLE_ROOT}/receipt.json": receipt.dumps(),
    }
    folders = ("opt", "opt/aotgaudi", BUNDLE_ROOT)
    return [
        *(({"name": name, "type": tarfile.DIRTYPE, "mode": 0o755}, b"") for name in folders),
        *(({"name": name, "mode": 0o644}, data) for name, data in files.items()),
    ]


NAMES = st.sampled_from(
    [
        "/etc/passwd",
        "../x",
        f"{BUNDLE_ROOT}/../../../x",
        f"{BUNDLE_ROOT}/objects/../../x",
        f"./{BUNDLE_ROOT}/manifest.json",
        f"{BUNDLE_ROOT}//manifest.json",
        f"{BUNDLE_ROOT}/objects/sha256",
        f"{BUNDLE_ROOT}/Manifest.json",
        f"{BUNDLE_ROOT}/.wh..wh..opq",
        "..",
        ".",
        "/",
        "a\\b",
        "C:\\x",
    ]
) | st.text(min_size=1, max_size=40)
TYPES = st.sampled_from(
    [b"0", b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"x", b"g", b"L", b"K", b"S", b"V", b"9"]
)


@st.composite
def hostile_archives(draw: st.DrawFn, members: list[Member]) -> bytes:
    """Honest members with some changed, doubled, dropped, moved, and hostile ones among them; maybe cut off."""
    rows = [(dict(header), data) for header, data in members]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(rows) - 1))
        kind = draw(st.sampled_from(["add", "change", "drop", "double", "swap", "content"]))
        header, data = rows[place]
        if kind == "add":
            new = {
                "name": draw(NAMES),
                "type": draw(TYPES),
                "linkname": draw(NAMES),
                "mode": draw(st.integers(0, 0o7777)),
            }
            rows.insert(place, (new, draw(st.binary(max_size=600))))
        elif kind == "change":
            field = draw(st.sampled_from(["name", "type", "mode", "size", "linkname", "mtime", "uid"]))
            value = {"name": NAMES, "linkname": NAMES, "type": TYPES}.get(
                field, st.integers(-(1 << 40), 1 << 66)
            )
            rows[place] = ({**header, field: draw(value)}, data)
        elif kind == "drop" and len(rows) > 1:
            del rows[place]
        elif kind == "double":
            rows.insert(draw(st.integers(0, len(rows))), rows[place])
        elif kind == "swap":
            other = draw(st.integers(0, len(rows) - 1))
            rows[place], rows[other] = rows[other], rows[place]
        else:
            rows[place] = (header, draw(changed(data)))
    written = archive_of(rows)
    return written[: draw(st.integers(0, len(written)))] if draw(st.integers(0, 7)) == 0 else written


def archive_of(rows: list[Member]) -> bytes:
    """Writes an archive; a header that tar will not write becomes one that it does, of junk."""
    blocks = []
    for header, data in rows:
        member = tarfile.TarInfo()
        member.size = len(data)
        for name, value in header.items():
            setattr(member, name, value)
        blocks += [_header(member), data, bytes(-len(data) % 512)]
    return b"".join([*blocks, bytes(1024)])


def _header(member: tarfile.TarInfo) -> bytes:
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        try:
            return member.tobuf(form, "utf-8", "surrogateescape")
        except (ValueError, OverflowError, UnicodeError):
            continue
    return b"\xff" * 512


# A bundle


def _program() -> bytes:
    call = Call(unit=sha256_bytes(b"unit"), inputs=(), outputs=())
    return Program(inputs=(), weights=(), caches=(), calls=(call,), outputs=()).dumps()


def _receipt() -> Receipt:
    unit = SealedUnit(artifact={"unit.so": str(Digest.of(b"artifact"))}, tolerance=1e-5)
    return Receipt(
        manifest_id="f" * 64,
        target=Target(backend="fake", machine="any", isa=("avx2",), toolchain={"torch": "1"}),
        programs={DecodeEntry(1, 1, 1).id: str(Digest.of(_program()))},
        units={sha256_bytes(b"unit"): unit},
        builder={"graphs": "1"},
    )


def _index(receipt: Receipt) -> BundleIndex:
    digests = sorted(map(str, (Digest.of(_program()), Digest.of(b"artifact"))))
    size = sum(Digest.parse(text).size_bytes for text in digests)
    return BundleIndex(
        manifest_id="f" * 64,
        manifest=str(Digest.of(b"{}")),
        receipt=str(Digest.of(receipt.dumps())),
        backend="fake",
        counts=Counts(programs=1, units=1, objects=2, object_bytes=size),
        objects=tuple(digests),
    )
