"""What an image says of the bundle in it: labels of its config, and the same as annotations of its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aotgaudi.bundle.opening import Bundle
from aotgaudi.digest import sha256_bytes

PREFIX = "io.github.aotgaudi"
MANIFEST_ID = f"{PREFIX}.manifest-id"
BUNDLE_INDEX = f"{PREFIX}.bundle-index"
BUNDLE_PATH = f"{PREFIX}.bundle-path"

BUNDLE_ROOT = "opt/aotgaudi/bundle"
"""Where a bundle lies in an image."""

_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
)


def bundle_labels(bundle: Bundle) -> dict[str, str]:
    """Returns the labels of an image that holds `bundle`: what it answers, for what, and how much there is."""
    counts, target = bundle.index.counts, bundle.receipt.target
    return {
        MANIFEST_ID: bundle.index.manifest_id,
        BUNDLE_INDEX: f"sha256:{sha256_bytes(bundle.index_bytes)}",
        BUNDLE_PATH: f"/{BUNDLE_ROOT}",
        f"{PREFIX}.target": " ".join((target.backend, target.machine, *target.isa)),
        f"{PREFIX}.entries": str(len(bundle.receipt.programs)),
        f"{PREFIX}.programs": str(counts.programs),
        f"{PREFIX}.units": str(counts.units),
        f"{PREFIX}.objects": str(counts.objects),
        f"{PREFIX}.object-bytes": str(counts.object_bytes),
    }


def architecture_of(bundle: Bundle) -> str:
    """Returns OCI's name of the machine that the bundle is for; amd64, Gaudi's hosts, where it is for none."""
    return _ARCHITECTURES.get(bundle.receipt.target.machine, "amd64")
