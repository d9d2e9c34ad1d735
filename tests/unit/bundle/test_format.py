"""The index: canonical, sorted, strict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aotgaudi.bundle.format import BundleIndex, Counts, load_index
from aotgaudi.digest import Digest, canonical_json
from aotgaudi.errors import ManifestError

BLOBS = sorted(str(Digest.of(data)) for data in (b"a", b"b", b"c"))


def make_index() -> BundleIndex:
    return BundleIndex(
        manifest_id="m",
        manifest=BLOBS[0],
        receipt=BLOBS[1],
        backend="cpu",
        counts=Counts(programs=1, units=2, objects=3, object_bytes=3),
        objects=tuple(BLOBS),
    )


def edited(**changes: Any) -> bytes:
    return canonical_json({**json.loads(make_index().dumps()), **changes})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (edited(objects=BLOBS[::-1]), "objects must be sorted, each once"),
        (edited(objects=[BLOBS[0], BLOBS[0]]), "objects must be sorted, each once"),
        (edited(objects=["../../etc/passwd"]), "objects.0"),
        (edited(schema="aotgaudi.bundle/0"), "this aotgaudi reads 'aotgaudi.bundle/1'"),
        (edited(counts={"programs": -1, "units": 0, "objects": 0, "object_bytes": 0}), "counts.programs"),
        (edited(extra=None), "extra"),
        (make_index().dumps()[:-1], "bundle index is not JSON"),
    ],
)
def test_a_malformed_index_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        load_index(data)
