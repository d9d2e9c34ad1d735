"""The structure of a manifest file, as types, and JSON Schemas of manifest and spec for editors and other tools.

``python -m aotgaudi.manifest.schema docs`` rewrites the committed schemas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from aotgaudi.entries import (
    DecodeEntry,
    DefragEntry,
    Entry,
    MhcEntry,
    PromptEntry,
    SamplerEntry,
    UnifiedEntry,
    VisionEntry,
)
from aotgaudi.files import write_atomic
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.spec.quantization import WeightsDtype

_Count = Annotated[int, Field(ge=1, le=LARGEST_LIMIT)]
_CountOrNone = Annotated[int, Field(ge=0, le=LARGEST_LIMIT)]


class PromptRows(SpecValue):
    """Prompt entries, one a row."""

    columns: tuple[Literal["batch_size"], Literal["query_len"], Literal["num_ctx_blocks"]]
    rows: tuple[tuple[_Count, _Count, _CountOrNone], ...]

    def entries(self) -> tuple[Entry, ...]:
        """Returns the rows as entries."""
        return tuple(PromptEntry(*row) for row in self.rows)


class DecodeRows(SpecValue):
    """Decode entries, one a row."""

    columns: tuple[Literal["batch_size"], Literal["query_len"], Literal["num_blocks"]]
    rows: tuple[tuple[_Count, _Count, _Count], ...]

    def entries(self) -> tuple[Entry, ...]:
        """Returns the rows as entries."""
        return tuple(DecodeEntry(*row) for row in self.rows)


class UnifiedRows(SpecValue):
    """Unified-attention entries, one a row."""

    columns: tuple[
        Literal["query_len"],
        Literal["num_shared_blocks"],
        Literal["num_unique_blocks"],
        Literal["is_causal"],
    ]
    rows: tuple[tuple[_Count, _CountOrNone, _CountOrNone, bool], ...]

    def entries(self) -> tuple[Entry, ...]:
        """Returns the rows as entries."""
        return tuple(UnifiedEntry(*row) for row in self.rows)


class VisionRows(SpecValue):
    """Vision tower entries, one a row."""

    columns: tuple[Literal["size"], Literal["is_batch"]]
    rows: tuple[tuple[_Count, bool], ...]

    def entries(self) -> tuple[Entry, ...]:
        """Returns the rows as entries."""
        return tuple(VisionEntry(*row) for row in self.rows)


_SamplerColumns = tuple[
    Literal["batch_size"],
    Literal["temperature"],
    Literal["top_p"],
    Literal["top_k"],
    Literal["batch_changed"],
    Literal["min_p"],
    Literal["presence_penalty"],
    Literal["frequency_penalty"],
    Literal["repetition_penalty"],
    Literal["num_logprobs"],
]
_ConstrainedColumns = tuple[
    Literal["batch_size"],
    Literal["temperature"],
    Literal["top_p"],
    Literal["top_k"],
    Literal["batch_changed"],
    Literal["min_p"],
    Literal["presence_penalty"],
    Literal["frequency_penalty"],
    Literal["repetition_penalty"],
    Literal["num_logprobs"],
    Literal["constraints"],
]
_SamplerValues = tuple[
    _CountOrNone,
    float,
    float,
    _CountOrNone,
    bool,
    float,
    float,
    float,
    float,
    _CountOrNone,
]
_ConstrainedValues = tuple[
    _CountOrNone,
    float,
    float,
    _CountOrNone,
    bool,
    float,
    float,
    float,
    float,
    _CountOrNone,
    Literal[True],
]


def _shape_of(row: object) -> str:
    """Returns whether a row has the last column, as a tag. Tags in angle brackets are no part of a place in an error."""
    return (
        "<long>" if isinstance(row, (list, tuple)) and len(row) == len(SamplerEntry.columns()) else "<short>"
    )


class SamplerRows(SpecValue):
    """Sampler entries, one a row. Those without constraints leave the last column out."""

    columns: Annotated[
        Annotated[_SamplerColumns, Tag("<short>")] | Annotated[_ConstrainedColumns, Tag("<long>")],
        Discriminator(_shape_of),
    ]
    rows: tuple[
        Annotated[
            Annotated[_SamplerValues, Tag("<short>")] | Annotated[_ConstrainedValues, Tag("<long>")],
            Discriminator(_shape_of),
        ],
        ...,
    ]

    def entries(self) -> tuple[Entry, ...]:
        """Returns the rows as entries."""
        return tuple(SamplerEntry(*row) for row in self.rows)


class DefragRows(SpecValue):
    """Defragmenter entries, one a row."""

    columns: tuple[Literal["padded_swaps"]]
    rows: tuple[tuple[_Count], ...]

    def entries(self) -> tuple[Entry, ...]:
        """Returns the rows as entries."""
        return tuple(DefragEntry(*row) for row in self.rows)


class MhcRows(SpecValue):
    """Hyper-connection entries, one a row."""

    columns: tuple[Literal["num_tokens"], Literal["n_splits"], Literal["sublayer"]]
    rows: tuple[tuple[_Count, _Count, Literal["attn", "ffn"]], ...]

    def entries(self) -> tuple[Entry, ...]:
        """Returns the rows as entries."""
        return tuple(MhcEntry(*row) for row in self.rows)


class EntryTables(SpecValue):
    """All entries, kind by kind."""

    prompt: PromptRows
    decode: DecodeRows
    unified: UnifiedRows
    vision: VisionRows
    sampler: SamplerRows
    defrag: DefragRows
    mhc: MhcRows

    def entries(self) -> tuple[Entry, ...]:
        """Returns all rows as entries, in manifest order."""
        return (
            *self.prompt.entries(),
            *self.decode.entries(),
            *self.unified.entries(),
            *self.vision.entries(),
            *self.sampler.entries(),
            *self.defrag.entries(),
            *self.mhc.entries(),
        )


class ManifestFile(SpecValue):
    """A manifest file. `id` is the sha256 of the canonical (RFC 8785) JSON of the file without `id`."""

    schema_: Literal["aotgaudi.manifest/2"] = Field(alias="schema")
    id: str = Field(pattern="^[0-9a-f]{64}$")
    spec: BuildSpec
    entries: EntryTables


def spec_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a spec file, in which three values may also be the path of a file."""
    schema = BuildSpec.model_json_schema()
    properties = schema["$defs"]["ModelSpec"]["properties"]
    path = {"type": "string", "description": "path of a config.json, relative to the spec file"}
    properties["config"] = {"title": "Config", "anyOf": [path, properties["config"]]}
    path = {"type": "string", "description": "path of a bucket file, relative to the spec file"}
    schema["$defs"]["BucketingSpec"]["properties"]["file"] = {"title": "File", **path}
    path = {
        "type": "string",
        "description": "path of the file that QUANT_CONFIG names, relative to the spec file",
    }
    schema["$defs"]["QuantizationSpec"]["properties"]["config"] = {"title": "Config", **path}
    quantization = schema["$defs"]["ModelSpec"]["properties"]["quantization"]
    quantization["anyOf"].insert(0, {"enum": list(get_args(WeightsDtype))})
    return schema


def schema_files() -> Mapping[str, bytes]:
    """Returns the committed schema files: name to content."""
    return {
        "manifest.schema.json": rendered_schema(ManifestFile.model_json_schema(), "aotgaudi manifest"),
        "spec.schema.json": rendered_schema(spec_schema(), "aotgaudi spec"),
    }


def rendered_schema(schema: Mapping[str, Any], title: str) -> bytes:
    """Returns a JSON Schema with its title, in its committed form."""
    titled = {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return (json.dumps(titled, indent=2, sort_keys=True) + "\n").encode()


if __name__ == "__main__":
    for file_name, content in schema_files().items():
        write_atomic(Path(sys.argv[1]) / file_name, content)
