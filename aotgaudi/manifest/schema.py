"""The structure of a manifest file, as types, and JSON Schemas of manifest and spec for editors and other tools.

``python -m aotgaudi.manifest.schema docs`` rewrites the committed schemas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, Union, get_args, get_type_hints

from pydantic import Discriminator, Field, Tag, create_model

from aotgaudi.entries import ENTRY_KINDS, Entry, SamplerEntry
from aotgaudi.files import write_atomic
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.spec.quantization import WeightsDtype

_Count = Annotated[int, Field(ge=1, le=LARGEST_LIMIT)]
_CountOrNone = Annotated[int, Field(ge=0, le=LARGEST_LIMIT)]


_MAY_BE_ZERO = frozenset({"num_ctx_blocks", "num_shared_blocks", "num_unique_blocks"})
"""And every number of a sampler entry."""
_VALUES: Mapping[str, Any] = {"sublayer": Literal["attn", "ffn"]}
_NOUNS = {
    "unified": "Unified-attention",
    "vision": "Vision tower",
    "defrag": "Defragmenter",
    "mhc": "Hyper-connection",
}


def _shape_of(row: object) -> str:
    """Returns how long a row is, as a tag. Tags in angle brackets are no part of a place in an error."""
    num = len(row) if isinstance(row, (list, tuple)) else 0
    return f"<{min(max(num, SamplerEntry.num_always_stored), len(SamplerEntry.columns()))}>"


def _tuple_of(types: Iterable[object]) -> Any:
    return GenericAlias(tuple, tuple(types))


def _of_any_width(types: Sequence[Any]) -> Any:
    """Returns the type of a sampler's row, which leaves out its last columns if they are off."""
    fewest, tagged = SamplerEntry.num_always_stored, list[Any]()
    for width in range(fewest, len(types) + 1):
        *before, last = types[:width]
        if width > fewest and last in (bool, float):
            last = Literal[True] if last is bool else Annotated[float, Field(gt=0)]
        tagged.append(Annotated[_tuple_of([*before, last]), Tag(f"<{width}>")])
    return Annotated[Union[tuple(tagged)], Discriminator(_shape_of)]


def _rows_of(kind: str, cls: type[Entry]) -> Any:
    """Returns the type of a table of entries: its columns are the entry's fields."""
    values, hints, is_sampler = [], get_type_hints(cls), cls is SamplerEntry
    for name in cls.columns():
        may_be_zero = is_sampler or name in _MAY_BE_ZERO
        number = _CountOrNone if may_be_zero else _Count
        values.append(_VALUES.get(name) or (number if hints[name] is int else hints[name]))
    doc = f"{_NOUNS.get(kind, kind.capitalize())} entries, one a row."
    names = [Literal[name] for name in cls.columns()]
    made = _of_any_width if is_sampler else _tuple_of
    return create_model(
        f"{kind.capitalize()}Rows",
        __base__=SpecValue,
        __doc__=f"{doc} The last columns are left out while they are off." if is_sampler else doc,
        columns=(made(names), ...),
        rows=(_tuple_of((made(values), ...)), ...),
    )


class _Tables(SpecValue):
    def entries(self) -> tuple[Entry, ...]:
        """Returns all rows as entries, in manifest order."""
        return tuple(cls(*row) for kind, cls in ENTRY_KINDS.items() for row in getattr(self, kind).rows)


_FIELDS: dict[str, Any] = {kind: (_rows_of(kind, cls), ...) for kind, cls in ENTRY_KINDS.items()}
EntryTables = create_model("EntryTables", __base__=_Tables, __doc__="All entries, kind by kind.", **_FIELDS)


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
