"""The JSON documents of OCI images that we read and write (opencontainers/image-spec, v1.1: manifest.md, config.md).

Reading follows the specification: unknown keys are ignored. The only hash is sha256. What we write is canonical JSON,
so that the same image has the same digest.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field, StringConstraints

from aotgaudi.digest import Digest, canonical_json
from aotgaudi.document import ForeignValue, first_problem
from aotgaudi.errors import ManifestError

MAX_MANIFEST_BYTES = 4 << 20
"""What registries accept as a manifest."""

IMAGE_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
IMAGE_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPES = {
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}
BUNDLE_INDEX_TYPE = "application/vnd.aotgaudi.bundle.index.v1+json"
BUNDLE_OBJECT_TYPE = "application/vnd.aotgaudi.bundle.object.v1"
SIGNATURE_TYPE = "application/vnd.dsse.envelope.v1+json"
RECORD_TYPE = "application/vnd.aotgaudi.record.v1+json"

REF_NAME = "org.opencontainers.image.ref.name"
LABEL_PREFIX = "io.github.aotgaudi"
MANIFEST_ID = f"{LABEL_PREFIX}.manifest-id"
BUNDLE_INDEX = f"{LABEL_PREFIX}.bundle-index"
BUNDLE_PATH = f"{LABEL_PREFIX}.bundle-path"
KSERVE_PREFIX = "io.kserve.km"
BUNDLE_ROOT = "opt/aotgaudi/bundle"
"""Where a bundle lies in an image."""

_DIGEST = r"^sha256:[0-9a-f]{64}\z"
_Annotations = dict[str, str]

M = TypeVar("M", bound=ForeignValue)


class Platform(ForeignValue):
    """Where an image runs."""

    architecture: str = ""
    os: str = ""


class Descriptor(ForeignValue):
    """Names a blob: its media type, its sha256 and its size in bytes."""

    media_type: Annotated[str, Field(alias="mediaType", max_length=255)]
    digest: Annotated[str, StringConstraints(pattern=_DIGEST)]
    size: Annotated[int, Field(ge=0, lt=1 << 53)]
    annotations: _Annotations | None = None
    platform: Platform | None = None

    @property
    def content(self) -> Digest:
        """The blob's digest."""
        return Digest(self.digest.removeprefix("sha256:"), self.size)


class ImageManifest(ForeignValue):
    """An image, or an artifact: a config and layers."""

    schema_version: Annotated[int, Field(alias="schemaVersion", ge=2, le=2)]
    media_type: Annotated[str | None, Field(alias="mediaType")] = None
    artifact_type: Annotated[str | None, Field(alias="artifactType")] = None
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: _Annotations | None = None


class ImageIndex(ForeignValue):
    """Several manifests: of a layout, or of one image on several platforms."""

    schema_version: Annotated[int, Field(alias="schemaVersion", ge=2, le=2)]
    manifests: tuple[Descriptor, ...]


def load_document(data: bytes, model: type[M], noun: str) -> M:
    """Parses a document. Raises ManifestError in one line that begins with `noun`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{noun} has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        return model.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise ManifestError(f"{noun}: {first_problem(error)}") from error


def descriptor(
    media_type: str, digest: Digest, annotations: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """Returns a descriptor, as JSON."""
    row = {"mediaType": media_type, "digest": f"sha256:{digest.sha256}", "size": digest.size_bytes, **more}
    return row | {"annotations": annotations} if annotations else row


def dump_manifest(
    config: dict[str, Any],
    layers: list[dict[str, Any]],
    annotations: dict[str, str],
    artifact_type: str | None = None,
) -> bytes:
    """Returns the bytes of an image manifest. Raises ManifestError where it is larger than registries accept."""
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": IMAGE_MANIFEST_TYPE,
        "config": config,
        "layers": layers,
        "annotations": annotations,
    }
    data = canonical_json(document | ({"artifactType": artifact_type} if artifact_type else {}))
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"the image manifest would have {len(data)} bytes for {len(layers)} layers,"
            f" registries take {MAX_MANIFEST_BYTES} (use `build image`: it has one layer)"
        )
    return data


def is_sha256(text: str) -> bool:
    """Whether `text` reads ``sha256:<64 hex>``, as OCI writes digests."""
    return re.fullmatch(r"sha256:[0-9a-f]{64}", text) is not None
