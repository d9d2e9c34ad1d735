"""Images that are written: valid, the same every time, on a base or alone; and bundles taken out of them again."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.signing import Signing, generate_key, load_signing_key
from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import CorruptError, ManifestError, SpecError, StoreError, TargetError, UntrustedError
from aotgaudi.share.image import pull_image, read_base, write_image
from aotgaudi.share.layer import Compression
from aotgaudi.share.oci import (
    BUNDLE_INDEX,
    BUNDLE_ROOT,
    IMAGE_CONFIG_TYPE,
    IMAGE_INDEX_TYPE,
    IMAGE_MANIFEST_TYPE,
    LAYER_TYPES,
    REF_NAME,
    Layout,
    LayoutPlace,
    parse_layout,
)
from tests.unit.bundle.conftest import CAPTURED, LAUNCH_ID, MANIFEST_ID, Sealed, SealedCapture
from tests.unit.failing import CALLS, fail_each
from tests.unit.share.archives import archive, file, files, honest


def documents(layout: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Index, manifest and config of a layout with one image."""
    index = json.loads((layout / "index.json").read_bytes())
    (row,) = index["manifests"]
    manifest = json.loads(blob(layout, row["digest"]))
    return index, manifest, json.loads(blob(layout, manifest["config"]["digest"]))


def blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / digest.replace(":", "/")).read_bytes()


def test_every_blob_has_the_digest_and_the_size_that_name_it(sealed: Sealed, tmp_path: Path) -> None:
    write_image(sealed.open(), tmp_path / "image", tag="v1")

    index, manifest, _ = documents(tmp_path / "image")
    rows = [*index["manifests"], manifest["config"], *manifest["layers"]]
    for row in rows:
        data = blob(tmp_path / "image", row["digest"])
        assert (f"sha256:{sha256_bytes(data)}", len(data)) == (row["digest"], row["size"])
    assert len(list((tmp_path / "image" / "blobs" / "sha256").iterdir())) == len(rows)
    assert json.loads((tmp_path / "image" / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    assert {path.name for path in (tmp_path / "image").iterdir()} == {"blobs", "index.json", "oci-layout"}


def test_the_image_says_what_is_in_it(sealed: Sealed, tmp_path: Path) -> None:
    write_image(sealed.open(), tmp_path / "image", tag="v1")

    index, manifest, config = documents(tmp_path / "image")
    labels = config["config"]["Labels"]
    assert labels["io.github.aotgaudi.manifest-id"] == MANIFEST_ID
    assert labels["io.github.aotgaudi.bundle-index"] == f"sha256:{sha256_bytes(sealed.open().index_bytes)}"
    assert labels["io.github.aotgaudi.target"] == "fake none avx2"
    assert labels["io.github.aotgaudi.isa"] == "avx2"
    assert labels["io.github.aotgaudi.torch"] == "2.13"
    assert labels["io.github.aotgaudi.entries"] == "3"
    assert labels["io.github.aotgaudi.objects"] == "5"
    assert manifest["annotations"] == labels
    assert index["manifests"][0]["annotations"] == {**labels, REF_NAME: "v1"}
    assert (config["architecture"], config["os"], config["rootfs"]["type"]) == ("amd64", "linux", "layers")


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_the_layer_is_a_plain_reproducible_archive(
    sealed: Sealed, tmp_path: Path, compression: Compression
) -> None:
    written = write_image(sealed.open(), tmp_path / "image", tag="v1", compression=compression)

    _, manifest, config = documents(tmp_path / "image")
    (layer,) = manifest["layers"]
    packed = blob(tmp_path / "image", layer["digest"])
    data = gzip.decompress(packed) if compression == "gzip" else _unzstd(packed)
    assert layer["mediaType"] == LAYER_TYPES[compression]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{sha256_bytes(data)}"] == [written.layer.diff_id]
    with tarfile.open(fileobj=io.BytesIO(data)) as read:
        members = read.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}
    assert {m.mode for m in members if m.isdir()} == {0o755}
    assert {m.mode for m in members if m.isreg() and "/objects/" in m.name} == {0o444}
    assert {m.mode for m in members if m.isreg() and "/objects/" not in m.name} == {0o644}
    assert {m.name for m in members if m.isreg()} == {f"{BUNDLE_ROOT}/{name}" for name in files(sealed.path)}


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def test_the_archive_is_byte_for_byte_what_tar_writes(sealed: Sealed, tmp_path: Path) -> None:
    written = write_image(sealed.open(), tmp_path / "image", tag="v1")

    members = honest(sealed)
    for member, _ in members:
        if "/objects/" in member.name and member.isreg():
            member.mode = 0o444
    assert written.layer.diff_id == f"sha256:{sha256_bytes(archive(members))}"


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_the_same_bundle_gives_the_same_image_elsewhere_and_later(
    sealed: Sealed, tmp_path: Path, compression: Compression
) -> None:
    first = write_image(sealed.open(), tmp_path / "image", tag="v1", compression=compression)
    before = os.umask(0o077)
    try:
        sealed.pack(tmp_path / "other" / "bundle")
        for path in (tmp_path / "other" / "bundle").rglob("*"):
            os.utime(path, (time.time() - 9999, 1))
        again = write_image(
            open_bundle(tmp_path / "other" / "bundle"),
            tmp_path / "image 2",
            tag="v1",
            compression=compression,
        )
    finally:
        os.umask(before)

    assert again == first
    assert files(tmp_path / "image") == files(tmp_path / "image 2")
    assert (tmp_path / "image 2").stat().st_mode & 0o777 == 0o755


def test_what_lies_beside_the_bundle_stays_out(sealed: Sealed, tmp_path: Path) -> None:
    first = write_image(sealed.open(), tmp_path / "image", tag="v1")
    (sealed.path / "secret.env").write_text("PASSWORD=x")

    assert write_image(sealed.open(), tmp_path / "other", tag="v1") == first


def test_a_damaged_bundle_gives_no_image(sealed: Sealed, tmp_path: Path) -> None:
    sealed.object("layer.so").write_bytes(b"x" * sealed.digests["layer.so"].size_bytes)

    with pytest.raises(CorruptError, match="mend it with"):
        write_image(sealed.open(), tmp_path / "image", tag="v1")
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "store"}


def test_an_image_of_a_bundle_is_replaced_and_nothing_else(sealed: Sealed, tmp_path: Path) -> None:
    write_image(sealed.open(), tmp_path / "image", tag="v1")
    write_image(sealed.open(), tmp_path / "image", tag="v2", compression="gzip")
    assert documents(tmp_path / "image")[0]["manifests"][0]["annotations"][REF_NAME] == "v2"

    base_layout(tmp_path / "base")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "image")
    for name, reason in {
        "base": "a layout with other images",
        "bundle": "neither empty nor an image layout",
        "file": "not a directory",
        "link": "not a directory",
    }.items():
        with pytest.raises(StoreError, match=reason):
            write_image(sealed.open(), tmp_path / name, tag="v1")


# On a base


def base_layout(root: Path, tags: tuple[str, ...] = ("base",), **changes: Any) -> dict[str, Any]:
    """Writes a layout with an image of one layer; returns its config."""
    layer = gzip.compress(b"any archive", mtime=0)
    config: dict[str, Any] = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2020-01-01T00:00:00Z",
        "config": {"Env": ["PATH=/bin"], "Entrypoint": ["/run"], "User": "1000", "Labels": {"a": "b"}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256_bytes(b'any archive')}"]},
        "history": [{"created_by": "base"}],
        "x-unknown": {"kept": True},
        **changes,
    }
    config_row = put(root, canonical_json(config), IMAGE_CONFIG_TYPE)
    layer_row = put(root, layer, LAYER_TYPES["gzip"])
    manifest = {"schemaVersion": 2, "config": config_row, "layers": [layer_row]}
    row = put(root, canonical_json(manifest), IMAGE_MANIFEST_TYPE)
    write_index(root, [{**row, "annotations": {REF_NAME: tag}} for tag in tags])
    return config


def write_index(root: Path, rows: list[dict[str, Any]]) -> None:
    (root / "oci-layout").write_bytes(canonical_json({"imageLayoutVersion": "1.0.0"}))
    (root / "index.json").write_bytes(canonical_json({"schemaVersion": 2, "manifests": rows}))


def put(root: Path, data: bytes, media_type: str) -> dict[str, Any]:
    digest = sha256_bytes(data)
    path = root / "blobs" / "sha256" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def test_a_base_keeps_what_it_is_and_gets_a_layer(sealed: Sealed, tmp_path: Path) -> None:
    base_config = base_layout(tmp_path / "base")

    base = read_base(tmp_path / "base", "base", sealed.open())
    written = write_image(sealed.open(), tmp_path / "image", tag="v1", base=base)

    _, manifest, config = documents(tmp_path / "image")
    assert [row["digest"] for row in manifest["layers"]][1:] == [f"sha256:{written.layer.blob.sha256}"]
    assert blob(tmp_path / "image", manifest["layers"][0]["digest"]) == gzip.compress(b"any archive", mtime=0)
    assert config["rootfs"]["diff_ids"] == [*base_config["rootfs"]["diff_ids"], written.layer.diff_id]
    assert [step["created_by"] for step in config["history"]] == ["base", "aotgaudi build image"]
    labels = config["config"].pop("Labels")
    assert labels["a"] == "b"
    assert labels["io.github.aotgaudi.manifest-id"] == MANIFEST_ID
    base_config["config"].pop("Labels")
    for name in ("architecture", "os", "created", "config", "x-unknown"):
        assert config[name] == base_config[name]


def test_a_base_is_found_by_its_tag(sealed: Sealed, tmp_path: Path) -> None:
    base_layout(tmp_path / "base", ("one", "two"))
    assert read_base(tmp_path / "base", "two", sealed.open()).config["os"] == "linux"
    assert read_base(tmp_path / "base", None, sealed.open()).config["os"] == "linux"  # Both are one image.

    with pytest.raises(SpecError, match=r"has no image 'three' \(tags: one, two\)"):
        read_base(tmp_path / "base", "three", sealed.open())


def test_of_several_images_one_is_named(sealed: Sealed, tmp_path: Path) -> None:
    base_layout(tmp_path / "base", ("one",))
    first = json.loads((tmp_path / "base" / "index.json").read_bytes())["manifests"]
    base_layout(tmp_path / "base", ("two",), created="2021-01-01T00:00:00Z")
    second = json.loads((tmp_path / "base" / "index.json").read_bytes())["manifests"]
    write_index(tmp_path / "base", first + second)

    with pytest.raises(SpecError, match="has several images"):
        read_base(tmp_path / "base", None, sealed.open())
    assert read_base(tmp_path / "base", "two", sealed.open()).config["created"] == "2021-01-01T00:00:00Z"


def test_of_an_image_for_several_platforms_ours_is_taken(sealed: Sealed, tmp_path: Path) -> None:
    base_layout(tmp_path / "base")
    (row,) = json.loads((tmp_path / "base" / "index.json").read_bytes())["manifests"]
    platforms = [
        {**row, "digest": f"sha256:{'0' * 64}", "platform": {"architecture": "arm64", "os": "linux"}},
        {**row, "platform": {"architecture": "amd64", "os": "linux"}},
    ]
    many = put(
        tmp_path / "base", canonical_json({"schemaVersion": 2, "manifests": platforms}), IMAGE_INDEX_TYPE
    )
    write_index(tmp_path / "base", [many])
    assert read_base(tmp_path / "base", None, sealed.open()).config["architecture"] == "amd64"

    none = put(
        tmp_path / "base", canonical_json({"schemaVersion": 2, "manifests": platforms[:1]}), IMAGE_INDEX_TYPE
    )
    write_index(tmp_path / "base", [none])
    with pytest.raises(SpecError, match="has no image for linux/amd64"):
        read_base(tmp_path / "base", None, sealed.open())


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"architecture": "arm64"}, TargetError, "is for 'arm64', the bundle for 'amd64'"),
        ({"rootfs": {"type": "layers", "diff_ids": []}}, ManifestError, "one diff_id for each layer"),
        ({"rootfs": None}, ManifestError, "one diff_id for each layer"),
        ({"config": []}, ManifestError, None),
        ({"config": {"Labels": [1]}}, ManifestError, "no object"),
        ({"history": {"a": 1}}, ManifestError, "history is no list"),
        (
            {"config": {"Labels": {"io.github.aotgaudi.manifest-id": "x"}}},
            SpecError,
            "holds a bundle already",
        ),
    ],
)
def test_a_base_that_cannot_be_built_on_is_refused(
    sealed: Sealed, tmp_path: Path, changes: dict[str, Any], error: type[Exception], reason: str | None
) -> None:
    base_layout(tmp_path / "base", **changes)

    if reason is None:  # An empty list is as good as no config.
        read_base(tmp_path / "base", None, sealed.open())
        return
    with pytest.raises(error, match=reason):
        read_base(tmp_path / "base", None, sealed.open())


def test_a_damaged_base_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    base_layout(tmp_path / "base")
    base = read_base(tmp_path / "base", None, sealed.open())
    for path in (tmp_path / "base" / "blobs" / "sha256").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(CorruptError):
        write_image(sealed.open(), tmp_path / "image", tag="v1", base=base)
    with pytest.raises(CorruptError):
        read_base(tmp_path / "base", None, sealed.open())


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
@pytest.mark.parametrize("data", [None, b"", b"[]", b"{}", b"[" * 10_000, b'{"imageLayoutVersion":"2.0.0"}'])
def test_what_is_no_layout_is_refused(tmp_path: Path, name: str, data: bytes | None) -> None:
    base_layout(tmp_path / "base")
    (tmp_path / "base" / name).unlink()
    if data is not None:
        (tmp_path / "base" / name).write_bytes(data)

    with pytest.raises((StoreError, ManifestError)):
        Layout(tmp_path / "base").find(None)


# And back


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_a_bundle_comes_back_out_of_an_image(
    sealed: Sealed, tmp_path: Path, compression: Compression
) -> None:
    base_layout(tmp_path / "base")
    base = read_base(tmp_path / "base", None, sealed.open())
    write_image(sealed.open(), tmp_path / "image", tag="v1", compression=compression, base=base)

    pulled = pull_image(f"oci:{tmp_path / 'image'}:v1", tmp_path / "out")

    assert files(pulled.path) == files(sealed.path)
    assert verify_bundle(pulled).is_intact
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "store", "base", "image", "out"}


def test_an_image_without_a_bundle_is_named(sealed: Sealed, tmp_path: Path) -> None:
    base_layout(tmp_path / "base")

    with pytest.raises(SpecError, match="is no image of a bundle"):
        pull_image(f"oci:{tmp_path / 'base'}", tmp_path / "out")


def image_of(root: Path, layer: bytes, index_bytes: bytes) -> str:
    """Writes an image with one layer, said to hold the bundle of that index, and returns its name."""
    row = put(root, layer, LAYER_TYPES["gzip"])
    row["annotations"] = {BUNDLE_INDEX: f"sha256:{sha256_bytes(index_bytes)}"}
    config = put(root, b"{}", IMAGE_CONFIG_TYPE)
    manifest = {"schemaVersion": 2, "config": config, "layers": [row]}
    write_index(root, [put(root, canonical_json(manifest), IMAGE_MANIFEST_TYPE)])
    return f"oci:{root}"


def changed(sealed: Sealed, name: str) -> bytes:
    """The bundle's archive with one byte of a file changed, compressed."""
    members = [
        (member, bytes([data[0] ^ 1]) + data[1:] if member.name.endswith(name) else data)
        for member, data in honest(sealed)
    ]
    return gzip.compress(archive(members))


def test_what_is_not_the_bundle_is_refused_and_the_one_that_is_there_stays(
    sealed: Sealed, tmp_path: Path
) -> None:
    index = sealed.open().index_bytes
    good = gzip.compress(archive(honest(sealed)))
    sealed.pack(tmp_path / "out")
    before = files(tmp_path / "out")
    cases = {
        "another index": (good, b"{}", "is another than the image says"),
        "object": (changed(sealed, sealed.digests["layer.so"].sha256), index, "sha256 is"),
        "receipt": (changed(sealed, "receipt.json"), index, "receipt.json"),
        "manifest": (changed(sealed, "manifest.json"), index, "manifest.json"),
        "link": (
            gzip.compress(archive([*honest(sealed), file("x", type=tarfile.SYMTYPE, linkname="/etc")])),
            index,
            "neither a plain file nor a directory",
        ),
        "cut": (good[: len(good) // 2], index, "cannot be read"),
    }

    wrong = {}
    for name, (layer, index_bytes, reason) in cases.items():
        try:
            pull_image(image_of(tmp_path / name, layer, index_bytes), tmp_path / "out")
            said = "pulled"
        except CorruptError as error:
            said = str(error)
        if reason not in said or files(tmp_path / "out") != before:
            wrong[name] = said

    assert wrong == {}
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("signer", [None, "other", "key"])
def test_a_bundle_that_nobody_trusted_has_signed_is_refused(
    sealed: Sealed, tmp_path: Path, signer: str | None
) -> None:
    policy = TrustPolicy(keys=frozenset([generate_key(tmp_path / "key")]))
    generate_key(tmp_path / "other")
    sealed.pack(tmp_path / "out")
    before = files(tmp_path / "out")
    if signer is not None:
        sealed.pack(signing=Signing((load_signing_key(tmp_path / signer),)))
    write_image(sealed.open(), tmp_path / "image", tag="v1")

    if signer == "key":
        pulled = pull_image(f"oci:{tmp_path / 'image'}", tmp_path / "out", policy)
        assert pulled.statement is not None
        assert files(pulled.path) == files(sealed.path)
        return
    with pytest.raises(UntrustedError, match="is not signed" if signer is None else "no trusted key has"):
        pull_image(f"oci:{tmp_path / 'image'}", tmp_path / "out", policy)
    assert files(tmp_path / "out") == before


def test_what_is_no_bundle_is_not_replaced(sealed: Sealed, tmp_path: Path) -> None:
    write_image(sealed.open(), tmp_path / "image", tag="v1")

    with pytest.raises(StoreError, match="neither a bundle nor empty"):
        pull_image(f"oci:{tmp_path / 'image'}", tmp_path / "store")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", CALLS)
def test_a_pull_during_which_one_call_fails_gives_the_new_bundle_or_keeps_the_old(
    sealed: Sealed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    write_image(sealed.open(), tmp_path / "image", tag="v1")
    sealed.pack(tmp_path / "out", receipt=sealed.receipt.model_copy(update={"builder": {"aotgaudi": "0"}}))

    def action() -> None:
        pull_image(f"oci:{tmp_path / 'image'}", tmp_path / "out")

    for _ in fail_each(monkeypatch, call, code, action):
        assert verify_bundle(open_bundle(tmp_path / "out")).is_intact


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", CALLS)
def test_an_image_during_which_one_call_fails_is_whole_or_not_there(
    sealed: Sealed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    bundle, numbers = sealed.open(), itertools.count()
    (tmp_path / "out").mkdir()

    def action() -> None:
        write_image(bundle, tmp_path / "out" / str(next(numbers)), tag="v1")

    errors = list(fail_each(monkeypatch, call, code, action))
    found = {path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")}

    assert {str(number) for number, error in enumerate(errors) if error is None} <= found
    for name in found:
        assert documents(tmp_path / "out" / name)[1]["layers"]
    if call not in ("unlink", "rmdir"):  # What cannot be removed stays.
        assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_a_layout_is_named_as_skopeo_does(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()

    assert parse_layout("oci:image:v1") == LayoutPlace(Path("image"), "v1")
    assert parse_layout("oci:/some/image") == LayoutPlace(Path("/some/image"), None)
    assert parse_layout("dir:x/image") == LayoutPlace(Path("dir:x/image"), None)
    assert parse_layout(str(tmp_path / "a:b")) == LayoutPlace(tmp_path / "a:b", None)


def test_an_image_of_captured_caches_has_labels_of_both_kinds_and_gives_the_bundle_back(
    captured: SealedCapture, tmp_path: Path
) -> None:
    write_image(captured.open(), tmp_path / "image", tag="v1")

    labels = documents(tmp_path / "image")[2]["config"]["Labels"]
    assert {name: value for name, value in labels.items() if name.startswith("io.kserve.km/")} == {
        "io.kserve.km/framework": "fake",
        "io.kserve.km/cache-type": "aotgaudi",
        "io.kserve.km/cache-hash": LAUNCH_ID,
        "io.kserve.km/cache-mount-subpath": "opt/aotgaudi/bundle",
        "io.kserve.km/cache-root-env": "AOTGAUDI_BUNDLE=/opt/aotgaudi/bundle",
    }
    assert labels["io.github.aotgaudi.files"] == str(len(CAPTURED))
    assert "io.github.aotgaudi.programs" not in labels
    pulled = pull_image(f"oci:{tmp_path / 'image'}:v1", tmp_path / "pulled")
    assert pulled.receipt == captured.receipt
    assert verify_bundle(pulled).is_intact


def test_an_image_of_programs_has_no_labels_that_place_caches(sealed: Sealed, tmp_path: Path) -> None:
    write_image(sealed.open(), tmp_path / "image", tag="v1")

    labels = documents(tmp_path / "image")[2]["config"]["Labels"]
    assert not [name for name in labels if name.startswith("io.kserve.km/")]
