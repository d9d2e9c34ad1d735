"""Manifest files: written for people to review in diffs, read with every byte of meaning checked.

Grammar (JSON, UTF-8, one newline at the end; key order fixed; config keys sorted)::

    {
      "schema": "aotgaudi.manifest/1",
      "id": <64 hex: sha256 of the RFC 8785 form of this object without "id">,
      "spec": <the resolved spec, indented>,
      "entries": {
        "prompt": {
          "columns": ["batch_size", "query_len", "num_ctx_blocks"],
          "rows": [<one row a line, values in the order of the columns>]
        },
        "decode": <"batch_size", "query_len", "num_blocks">,
        "sampler": <"batch_size", "temperature", "top_p", "top_k", "batch_changed">,
        "defrag": <"padded_swaps">
      }
    }

Version history: 1, the first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aotgaudi.atomicfile import write_atomic
from aotgaudi.errors import ManifestError, SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.schema import ManifestFile
from aotgaudi.spec.mistakes import first_mistake

_INDENT = "  "


def dumps(manifest: Manifest) -> bytes:
    """Returns the file form: equal manifests have equal bytes."""
    content = manifest.content()
    tables = ",\n".join(_table(kind, table) for kind, table in content["entries"].items())
    spec = json.dumps(_sorted_config(content["spec"]), indent=_INDENT).replace("\n", f"\n{_INDENT}")
    head = f'  "schema": {json.dumps(content["schema"])},\n  "id": "{manifest.id}",\n  "spec": {spec}'
    return f'{{\n{head},\n  "entries": {{\n{tables}\n  }}\n}}\n'.encode()


def loads(data: bytes) -> Manifest:
    """Returns the manifest that `data` holds; any JSON formatting of it will do.

    Raises:
        ManifestError: it is not a manifest of this version, or its content is not what its id says.
    """
    try:
        file = ManifestFile.model_validate_json(data)
        manifest = Manifest(file.spec, file.entries.entries())
        found = manifest.id
    except ValidationError as error:
        raise ManifestError(str(first_mistake(error, ManifestFile))) from error
    except SpecError as error:
        raise ManifestError(f"spec.{error}") from error
    except ValueError as error:
        raise ManifestError(f"entries: {error}") from error
    if found != file.id:
        raise ManifestError(
            f"id: is {file.id}, but the content hashes to {found}"
            " (a manifest is not edited: change its spec and run `aotgaudi build manifest`)"
        )
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest file. Raises ManifestError, which names the file."""
    try:
        return loads(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest file atomically. Raises StoreError."""
    write_atomic(path, dumps(manifest))


def _sorted_config(spec: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(json.dumps(spec["model"]["config"], sort_keys=True))
    return {**spec, "model": {**spec["model"], "config": config}}


def _table(kind: str, table: dict[str, Any]) -> str:
    rows = ",\n".join(f"        {json.dumps(row)}" for row in table["rows"])
    body = f"[\n{rows}\n      ]" if rows else "[]"
    columns = json.dumps(table["columns"])
    return f'    "{kind}": {{\n      "columns": {columns},\n      "rows": {body}\n    }}'
