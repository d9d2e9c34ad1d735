"""What a bucket file holds and what its server must be given besides, for people and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aotgaudi.bucketing.reachable import counted
from aotgaudi.manifest.bucket_file import BucketFile
from aotgaudi.manifest.coverage import described_scheduler, left_out


def bucket_document(path: Path, found: BucketFile) -> dict[str, Any]:
    """Returns what was written to `path`, and for which server, as a JSON value."""
    return {
        "bucket_file": str(path),
        "model": found.spec.model.name,
        "version": found.spec.bucketing.version,
        "scheduler": described_scheduler(found.spec),
        "num_buckets": {"prompt": len(found.prompt), "decode": len(found.decode)},
        "flags": {**found.pinned, **found.switches},
        "set": dict(found.variables(str(path.absolute()))),
        "unset": list(found.unset),
        "left_out": list(left_out(found.spec)),
    }


def bucket_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields what `bucket_document` says, in words."""
    buckets = document["num_buckets"]
    sizes = " and ".join(counted(number, f"{phase} bucket") for phase, number in buckets.items())
    yield f"{document['bucket_file']}: {sizes} for {document['model']}"
    yield (
        f"each step of {document['scheduler']} is looked up to one of them that {document['version']} warms up"
    )
    if document["left_out"]:
        yield f"left out of the proof: {'; '.join(document['left_out'])}"
    yield f"set: {' '.join(f'{name}={shlex.quote(value)}' for name, value in document['set'].items())}"
    yield f"unset: {' '.join(document['unset'])}"
    yield f"the server's flags: {' '.join(_flag(name, value) for name, value in document['flags'].items())}"


def _flag(name: str, value: bool | int) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"
