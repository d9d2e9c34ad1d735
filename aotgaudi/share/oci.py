"""OCI images: their JSON documents (opencontainers/image-spec, v1.1: manifest.md, config.md) and layouts (image-layout.md).

As the specification says, unknown keys are ignored when we read. The only hash is sha256. We write canonical JSON, so the
same image has the same digest. A layout is a directory::

    oci-layout             {"imageLayoutVersion":"1.0.0"}
    index.json             the images, by tag
    blobs/sha256/<hex>     manifests, configs, layers
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field, StringConstraints

from aotgaudi.bundle.staging import holds_something, replacing
from aotgaudi.digest import Digest, canonical_json
from aotgaudi.document import Count, ForeignValue, first_problem
from aotgaudi.errors import CorruptError, ManifestError, SpecError, StoreError
from aotgaudi.files import Temporary, place, temporary_file, write_atomic
from aotgaudi.store.cas import Fault, read_blob, read_bounded, verified_chunks

MAX_MANIFEST_BYTES = 4 << 20
"""The largest manifest that registries accept."""

IMAGE_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
IMAGE_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPES = {
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}

REF_NAME = "org.opencontainers.image.ref.name"
LABEL_PREFIX = "io.github.aotgaudi"
MANIFEST_ID = f"{LABEL_PREFIX}.manifest-id"
BUNDLE_INDEX = f"{LABEL_PREFIX}.bundle-index"
BUNDLE_PATH = f"{LABEL_PREFIX}.bundle-path"
KSERVE_PREFIX = "io.kserve.km"
BUNDLE_ROOT = "opt/aotgaudi/bundle"
"""The path of a bundle in an image."""

_DIGEST = r"^sha256:[0-9a-f]{64}\z"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_Annotations = dict[str, str]

M = TypeVar("M", bound=ForeignValue)


class Platform(ForeignValue):
    """The platform that an image runs on."""

    architecture: str = ""
    os: str = ""


class Descriptor(ForeignValue):
    """Names a blob: its media type, its sha256 and its size in bytes."""

    media_type: Annotated[str, Field(alias="mediaType", max_length=255)]
    digest: Annotated[str, StringConstraints(pattern=_DIGEST)]
    size: Count
    annotations: _Annotations | None = None
    platform: Platform | None = None

    @property
    def content(self) -> Digest:
        """The blob's digest."""
        return Digest(self.digest.removeprefix("sha256:"), self.size)


class ImageManifest(ForeignValue):
    """The manifest of an image: a config and layers."""

    schema_version: Annotated[int, Field(alias="schemaVersion", ge=2, le=2)]
    media_type: Annotated[str | None, Field(alias="mediaType")] = None
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: _Annotations | None = None


class ImageIndex(ForeignValue):
    """An index of several manifests: those of a layout, or those of one image for several platforms."""

    schema_version: Annotated[int, Field(alias="schemaVersion", ge=2, le=2)]
    manifests: tuple[Descriptor, ...]


def load_document(data: bytes, model: type[M], noun: str) -> M:
    """Parses a document. Raises ManifestError with one line that begins with `noun`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{noun} has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        return model.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise ManifestError(f"{noun}: {first_problem(error)}") from error


def descriptor(
    media_type: str, digest: Digest, annotations: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """Returns a descriptor as JSON."""
    row = {"mediaType": media_type, "digest": f"sha256:{digest.sha256}", "size": digest.size_bytes, **more}
    return row | {"annotations": annotations} if annotations else row


def dump_manifest(config: dict[str, Any], layers: list[dict[str, Any]], annotations: dict[str, str]) -> bytes:
    """Returns the bytes of an image manifest."""
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST_TYPE,
            "config": config,
            "layers": layers,
            "annotations": annotations,
        }
    )


def check_tag(tag: str) -> str:
    """Returns `tag` if it can be an image's tag. Otherwise raises SpecError."""
    if not _TAG.fullmatch(tag):
        raise SpecError(
            f"tag {tag!r:.150}",
            "is none",
            "at most 128 letters, digits, '.', '_', '-'; the first is no '.' or '-'",
        )
    return tag


LAYOUT_NAME = "oci-layout"
INDEX_NAME = "index.json"
_LAYOUT = canonical_json({"imageLayoutVersion": "1.0.0"})
_BLOB_MODE = 0o644


@dataclass(frozen=True)
class LayoutPlace:
    """The path of an image layout, and the tag of an image in it (None: the only image)."""

    root: Path
    tag: str | None


def parse_layout(text: str) -> LayoutPlace:
    """Parses ``[oci:]DIR[:TAG]``. An existing directory may have colons in its name."""
    text = text.removeprefix("oci:")
    root, separator, tag = text.rpartition(":")
    if not separator or "/" in tag or Path(text).is_dir():
        return LayoutPlace(Path(text), None)
    return LayoutPlace(Path(root), tag)


class Layout:
    """The layout at `root`, for reading. Every blob is verified as it is read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def blob_path(self, digest: Digest) -> Path:
        """Returns the path of a blob."""
        return self.root / "blobs" / "sha256" / digest.sha256

    def read(self, digest: Digest) -> bytes:
        """Returns the bytes of a blob of a document's size. Raises CorruptError, StoreError, ManifestError."""
        if digest.size_bytes > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{self.blob_path(digest)} has more than {MAX_MANIFEST_BYTES} bytes")
        data = read_blob(self.blob_path(digest), digest)
        if isinstance(data, Fault):
            raise CorruptError(f"{self.blob_path(digest)}: {data.reason}")
        return data

    def index(self) -> ImageIndex:
        """Returns the index. Raises StoreError if this is not a layout, and ManifestError."""
        marker = read_bounded(self.root / LAYOUT_NAME, MAX_MANIFEST_BYTES)
        data = read_bounded(self.root / INDEX_NAME, MAX_MANIFEST_BYTES)
        if isinstance(marker, Fault) or isinstance(data, Fault):
            raise StoreError(
                f"{self.root} is no OCI image layout: {LAYOUT_NAME} or {INDEX_NAME} is missing or unreadable"
                " (make one: skopeo copy docker://IMAGE oci:DIR:TAG)"
            )
        _check_version(marker, self.root)
        return load_document(data, ImageIndex, str(self.root / INDEX_NAME))

    def find(self, tag: str | None, architecture: str | None = None) -> ImageManifest:
        """Returns the image with this tag or, without a tag, the only image. Raises SpecError if there is none.

        For an image for several platforms, returns the one for Linux on `architecture`.
        """
        rows = [row for row in self.index().manifests if tag is None or _tag_of(row) == tag]
        tags = ", ".join(filter(None, map(_tag_of, self.index().manifests))) or "none"
        if not rows:
            raise SpecError(
                str(self.root), f"has no image {tag!r}" if tag else "has no image", f"tags: {tags}"
            )
        if len({row.digest for row in rows}) > 1 and tag is None:
            raise SpecError(str(self.root), "has several images", f"say which: {self.root}:TAG; tags: {tags}")
        return self._manifest(rows[0], architecture)

    def _manifest(self, row: Descriptor, architecture: str | None) -> ImageManifest:
        if row.media_type == IMAGE_INDEX_TYPE:
            index = load_document(self.read(row.content), ImageIndex, f"image index {row.digest}")
            row = _of_platform(index, architecture, row)
        if row.media_type != IMAGE_MANIFEST_TYPE:
            raise SpecError(
                str(self.root),
                f"has an image of type {row.media_type}",
                f"{IMAGE_MANIFEST_TYPE}: convert it with skopeo copy --format oci",
            )
        return load_document(self.read(row.content), ImageManifest, f"image manifest {row.digest}")


class LayoutWriter:
    """Writes the files of a layout into a new directory. `commit` completes the layout."""

    def __init__(self, root: Path) -> None:
        self._layout = Layout(root)
        self._root = root

    @contextlib.contextmanager
    def new_blob(self) -> Iterator[Temporary]:
        """Yields a file to write a blob to. `add` gives it its name."""
        with temporary_file(self._root / "tmp") as file:
            yield file

    def add(self, file: Temporary, digest: Digest) -> None:
        """Names a written file by its digest. Raises OSError."""
        path = self._layout.blob_path(digest)
        file.settle(_BLOB_MODE)
        place(file.path, path, path.exists)

    def add_bytes(self, data: bytes) -> Digest:
        """Writes a blob. Raises OSError."""
        digest = Digest.of(data)
        with self.new_blob() as file:
            file.write(data)
            self.add(file, digest)
        return digest

    def add_from(self, source: Layout, digest: Digest) -> None:
        """Copies a blob and verifies it on the way. Raises CorruptError, StoreError and OSError."""
        with self.new_blob() as file:
            for chunk in verified_chunks(source.blob_path(digest), digest):
                file.write(chunk)
            self.add(file, digest)

    def commit(self, image: dict[str, Any]) -> None:
        """Writes the index, with one image (a descriptor), and the marker. Raises StoreError and OSError."""
        index = {"schemaVersion": 2, "mediaType": IMAGE_INDEX_TYPE, "manifests": [image]}
        write_atomic(self._root / INDEX_NAME, canonical_json(index))
        write_atomic(self._root / LAYOUT_NAME, _LAYOUT)


@contextlib.contextmanager
def new_layout(out: Path) -> Iterator[LayoutWriter]:
    """Yields the writer of a layout that appears at `out`, whole, when the block ends without an error.

    Replaces an empty directory, or a layout that holds only images of bundles. Raises StoreError.
    """
    with replacing(out, "the image layout", refuse_foreign_layout) as building:
        yield LayoutWriter(building)


def refuse_foreign_layout(out: Path) -> None:
    """Raises StoreError unless `out` is missing, empty, or a layout that holds only images of bundles."""
    refusal = f"cannot write an image layout at {out}: it is"
    if not holds_something(out, refusal):
        return
    try:
        rows = Layout(out).index().manifests
    except (ManifestError, StoreError) as error:
        raise StoreError(f"{refusal} neither empty nor an image layout (choose another path)") from error
    if any(MANIFEST_ID not in (row.annotations or {}) for row in rows):
        raise StoreError(f"{refusal} a layout with other images (choose another path)")


def _check_version(marker: bytes, root: Path) -> None:
    try:
        version = json.loads(marker)["imageLayoutVersion"]
    except (ValueError, TypeError, KeyError, RecursionError):
        version = None
    if version != "1.0.0":
        raise ManifestError(f"{root / LAYOUT_NAME}: imageLayoutVersion is {version!r:.50}, should be '1.0.0'")


def _tag_of(row: Descriptor) -> str | None:
    return (row.annotations or {}).get(REF_NAME)


def _of_platform(index: ImageIndex, architecture: str | None, row: Descriptor) -> Descriptor:
    fitting = [
        manifest
        for manifest in index.manifests
        if manifest.platform
        and manifest.platform.os == "linux"
        and architecture in (None, manifest.platform.architecture)
    ]
    if not fitting:
        raise SpecError(f"image {row.digest}", f"has no image for linux/{architecture}", "another base image")
    return fitting[0]
