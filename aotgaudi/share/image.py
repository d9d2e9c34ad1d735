"""Writes a bundle as an OCI image into a layout, and takes the bundle out of an image again.

Without a base, the image holds only data. Kubernetes can mount it as an image volume, and ``COPY --from`` can copy it. On a
base image, the bundle is one more layer. The base's configuration stays (entry point, environment, user, history), and its
layers are copied.

Between registries and layouts, images are copied with skopeo, which knows credentials, certificates and mirrors.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.bundle.staging import replacing
from aotgaudi.bundle.trust import ANY_BUNDLE, TrustPolicy
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import CorruptError, ManifestError, RemoteError, SpecError, TargetError
from aotgaudi.files import open_descriptor
from aotgaudi.share.layer import Compression, Layer, unpack_layer, write_layer
from aotgaudi.share.oci import (
    BUNDLE_INDEX,
    BUNDLE_PATH,
    BUNDLE_ROOT,
    IMAGE_CONFIG_TYPE,
    IMAGE_MANIFEST_TYPE,
    KSERVE_PREFIX,
    LABEL_PREFIX,
    LAYER_TYPES,
    MANIFEST_ID,
    REF_NAME,
    Descriptor,
    ImageManifest,
    Layout,
    LayoutPlace,
    LayoutWriter,
    descriptor,
    dump_manifest,
    new_layout,
    parse_layout,
)

_EPOCH = "1970-01-01T00:00:00Z"
_CREATED_BY = "aotgaudi build image"
_IMAGE_NAME = ".image"
_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
)


@dataclass(frozen=True)
class Base:
    """An image to build on: its layout, its manifest, and its configuration as JSON."""

    layout: Layout
    manifest: ImageManifest
    config: dict[str, Any]


@dataclass(frozen=True)
class WrittenImage:
    """The digests of a written image's manifest and of its layer with the bundle."""

    manifest: Digest
    layer: Layer


@contextlib.contextmanager
def open_base(text: str, bundle: Bundle, *, is_insecure: bool = False) -> Iterator[Base]:
    """Yields the image to build on: of a layout (``[oci:]DIR[:TAG]``), or of a registry (``docker://HOST/NAME:TAG``).

    Raises like `read_base`, and RemoteError.
    """
    if "://" not in text:
        place = parse_layout(text)
        yield read_base(place.root, place.tag, bundle)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy_image(
            text, layout_name(Path(folder)), is_insecure=is_insecure, architecture=architecture_of(bundle)
        )
        yield read_base(Path(folder), None, bundle)


def read_base(root: Path, tag: str | None, bundle: Bundle) -> Base:
    """Reads the image to build on from a layout.

    Raises StoreError or ManifestError if it is not a layout or not an image, SpecError if there is no such tag or the base
    already holds a bundle, and TargetError if its architecture is not the bundle's.
    """
    layout, architecture = Layout(root), architecture_of(bundle)
    image = layout.find(tag, architecture)
    config = _read_config(layout, image)
    if config.get("architecture") != architecture:
        raise TargetError(
            f"base image {root} is for {config.get('architecture')!r:.50}, the bundle for {architecture!r}"
        )
    if MANIFEST_ID in (config["config"].get("Labels") or {}):
        raise SpecError(str(root), "the base image holds a bundle already", "the image without one")
    return Base(layout, image, config)


def write_image(
    bundle: Bundle, out: Path, *, tag: str, compression: Compression = "zstd", base: Base | None = None
) -> WrittenImage:
    """Writes `bundle` as the image `tag` of a layout at `out`, which then holds nothing else.

    Raises CorruptError if the bundle or the base is damaged, and StoreError.
    """
    labels = bundle_labels(bundle)
    with new_layout(out) as writer:
        with writer.new_blob() as file:
            layer = write_layer(bundle, file, compression)
            writer.add(file, layer.blob)
        config = writer.add_bytes(canonical_json(_config(base, architecture_of(bundle), labels, layer)))
        annotations = {name: labels[name] for name in (BUNDLE_INDEX, MANIFEST_ID)}
        row = descriptor(LAYER_TYPES[compression], layer.blob, annotations)
        layers = [*_copy_base(base, writer), row]
        manifest = dump_manifest(descriptor(IMAGE_CONFIG_TYPE, config), layers, labels)
        digest = writer.add_bytes(manifest)
        platform = {"architecture": architecture_of(bundle), "os": "linux"}
        row = descriptor(IMAGE_MANIFEST_TYPE, digest, {**labels, REF_NAME: tag}, platform=platform)
        writer.commit(row)
    return WrittenImage(digest, layer)


def bundle_labels(bundle: Bundle) -> dict[str, str]:
    """Returns the labels of an image that holds `bundle`: what it answers, for which target, and how much it holds."""
    counts, target = bundle.index.counts, bundle.receipt.target
    labels = {
        MANIFEST_ID: bundle.index.manifest_id,
        BUNDLE_INDEX: f"sha256:{sha256_bytes(bundle.index_bytes)}",
        BUNDLE_PATH: f"/{BUNDLE_ROOT}",
        f"{LABEL_PREFIX}.target": " ".join((target.backend, target.machine, *target.isa)),
        f"{LABEL_PREFIX}.torch": target.toolchain.get("torch", ""),
        f"{LABEL_PREFIX}.isa": " ".join(target.isa),
        **_contents(bundle),
        f"{LABEL_PREFIX}.objects": str(counts.objects),
        f"{LABEL_PREFIX}.object-bytes": str(counts.object_bytes),
    }
    return {name: text for name, text in labels.items() if text}


def _contents(bundle: Bundle) -> dict[str, str]:
    """Returns labels with the numbers of programs or, for a capture, the number of files and KServe's labels."""
    counts = bundle.index.counts
    if isinstance(bundle.receipt, CaptureReceipt):
        return {f"{LABEL_PREFIX}.files": str(counts.units), **_kserve_labels(bundle)}
    return {
        f"{LABEL_PREFIX}.entries": str(len(bundle.receipt.programs)),
        f"{LABEL_PREFIX}.programs": str(counts.programs),
        f"{LABEL_PREFIX}.units": str(counts.units),
    }


def _kserve_labels(bundle: Bundle) -> dict[str, str]:
    """Returns the labels by which KServe's Kernel Manager places an image of caches (redhat-et/GKM: mcv/pkg/cacheplan).

    We use our own cache type, because no server can read a bundle as a directory. A manager that knows only
    ``torch-compile`` must report that (UnsupportedCacheTypeError there) instead of mounting files that no server finds.
    Subpath and variable say where the bundle belongs.
    """
    return {
        f"{KSERVE_PREFIX}/framework": bundle.launch.guest,
        f"{KSERVE_PREFIX}/cache-type": "aotgaudi",
        f"{KSERVE_PREFIX}/cache-hash": bundle.index.manifest_id,
        f"{KSERVE_PREFIX}/cache-mount-subpath": BUNDLE_ROOT,
        f"{KSERVE_PREFIX}/cache-root-env": f"AOTGAUDI_BUNDLE=/{BUNDLE_ROOT}",
    }


def architecture_of(bundle: Bundle) -> str:
    """Returns OCI's name of the bundle's architecture. If the bundle has none, it is amd64, as on Gaudi's hosts."""
    return _ARCHITECTURES.get(bundle.receipt.target.machine, "amd64")


def _read_config(layout: Layout, manifest: ImageManifest) -> dict[str, Any]:
    noun = f"image config {manifest.config.digest}"
    try:
        config = json.loads(layout.read(manifest.config.content))
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{noun} is not JSON: {error}") from error
    match config:
        case {"rootfs": {"type": "layers", "diff_ids": list(ids)}} if len(ids) == len(manifest.layers):
            config["config"] = config.get("config") or {}
        case _:
            raise ManifestError(
                f"{noun}: its rootfs does not list one diff_id for each layer of the manifest"
            )
    inner = config["config"]
    if not isinstance(inner, dict) or not isinstance(inner.get("Labels") or {}, dict):
        raise ManifestError(f"{noun}: its config, or the Labels in it, are no object")
    if not isinstance(config.get("history") or [], list):
        raise ManifestError(f"{noun}: its history is no list")
    return dict(config)


def _config(base: Base | None, architecture: str, labels: dict[str, str], layer: Layer) -> dict[str, Any]:
    """Returns the image's configuration: the base's, with added labels, a layer and a line of history."""
    if base is None:
        config: dict[str, Any] = {
            "architecture": architecture,
            "os": "linux",
            "created": _EPOCH,
            "config": {},
        }
        config["rootfs"] = {"type": "layers", "diff_ids": []}
    else:
        config = copy.deepcopy(base.config)
    config["config"]["Labels"] = {**(config["config"].get("Labels") or {}), **labels}
    config["rootfs"]["diff_ids"].append(layer.diff_id)
    step = {"created": _EPOCH, "created_by": _CREATED_BY, "comment": f"/{BUNDLE_ROOT}"}
    config["history"] = [*(config.get("history") or []), step]
    return config


def _copy_base(base: Base | None, writer: LayoutWriter) -> list[dict[str, Any]]:
    """Copies the base's layers, and returns their descriptors."""
    if base is None:
        return []
    rows = base.manifest.layers
    for content in dict.fromkeys(row.content for row in rows):
        writer.add_from(base.layout, content)
    return [descriptor(row.media_type, row.content, row.annotations) for row in rows]


def pull_image(
    source: str, out: Path, policy: TrustPolicy = ANY_BUNDLE, *, is_insecure: bool = False
) -> Bundle:
    """Replaces `out` by the bundle in the image `source`, verified, and returns the opened bundle.

    `source` is a layout, ``oci:DIR[:TAG]``, or another name that skopeo copies an image from.

    Raises:
        CorruptError: the image does not hold exactly one whole bundle, or holds another than it says.
        UntrustedError: `policy` does not allow the bundle.
        RemoteError, StoreError, SpecError: the image cannot be read, holds no bundle, or `out` cannot be written.
    """
    with replacing(out, "the bundle") as building:
        _unpack_image(source, building, is_insecure=is_insecure)
        report = verify_bundle(open_bundle(building, policy))
        if report.corrupt:
            raise CorruptError(f"{source}: {report.corrupt[0].path}: {report.corrupt[0].reason}")
    return open_bundle(out, policy)


def _unpack_image(source: str, building: Path, *, is_insecure: bool) -> None:
    copied = building / _IMAGE_NAME
    place = parse_layout(source) if source.startswith("oci:") else LayoutPlace(copied, None)
    if place.root == copied:
        copy_image(source, layout_name(copied), is_insecure=is_insecure)
    layout = Layout(place.root)
    layer = _bundle_layer(layout.find(place.tag), source)
    with open(open_descriptor(layout.blob_path(layer.content)), "rb") as file:
        unpack_layer(file, layer.media_type, building)
    index = Digest.of((building / INDEX_NAME).read_bytes())
    if (layer.annotations or {})[BUNDLE_INDEX] != f"sha256:{index.sha256}":
        raise CorruptError(f"{source}: the bundle in the layer is another than the image says")
    if place.root == copied:
        shutil.rmtree(copied)


def _bundle_layer(manifest: ImageManifest, source: str) -> Descriptor:
    """Returns the last layer that is marked as a bundle's. Raises SpecError if there is none."""
    for row in reversed(manifest.layers):
        if BUNDLE_INDEX in (row.annotations or {}):
            return row
    raise SpecError(
        source,
        "is no image of a bundle: no layer of it is marked as one",
        "an image that `aotgaudi push` or `aotgaudi build image` wrote",
    )


_STANDARD_ERROR = 2
_MESSAGE = re.compile(r'msg="((?:[^"\\]|\\.)*)"')
_INSTALL = "apt-get install skopeo, dnf install skopeo, or brew install skopeo"


def copy_image(
    source: str, destination: str, *, is_insecure: bool = False, architecture: str | None = None
) -> str:
    """Copies an image between two names of skopeo's, and returns the digest of its manifest at the destination.

    Args:
        source: An image, as ``docker://HOST/NAME:TAG`` or in another of skopeo's transports.
        destination: Where to write it.
        is_insecure: Use plain http and unverified TLS with registries, too.
        architecture: Of an image for several platforms, take the one for Linux on this architecture, not on this machine's.

    Raises RemoteError if skopeo is missing or fails.
    """
    has_terminal = os.isatty(_STANDARD_ERROR)
    with tempfile.TemporaryDirectory() as folder:
        digest = Path(folder, "digest")
        command = ["skopeo"]
        if architecture is not None:
            command += ["--override-os", "linux", "--override-arch", architecture]
        command += ["copy", "--digestfile", str(digest)]
        if not has_terminal:
            command.append("--quiet")
        if is_insecure:
            command += ["--src-tls-verify=false", "--dest-tls-verify=false"]
        try:
            done = subprocess.run(
                [*command, "--", source, destination],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR if has_terminal else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            raise RemoteError(f"skopeo, which copies images, is not installed ({_INSTALL})") from error
        except OSError as error:
            raise RemoteError(f"skopeo cannot be started: {error.strerror}") from error
        if done.returncode:
            raise RemoteError(f"skopeo: {_last_message(done.stderr)}")
        return digest.read_text(encoding="ascii")


def layout_name(root: Path) -> str:
    """Returns skopeo's name of an image layout. Raises SpecError: skopeo takes what follows a colon for a tag."""
    if ":" in str(root):
        raise SpecError(str(root), "skopeo reads no path with a colon", "another directory")
    return f"oci:{root}"


def _last_message(text: str) -> str:
    line = (text.strip().splitlines() or ["it failed without a message"])[-1]
    found = _MESSAGE.search(line)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else line
