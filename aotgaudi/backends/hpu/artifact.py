"""The artifact of an hpu unit: ``graph.txt``, ``unit.json``, and recipes (docs/formats/hpu-unit.md).

``graph.txt`` is the unit's canonical text, from which every process runs the front end. ``unit.json`` is canonical JSON::

    {"schema":   "aotgaudi.hpu-unit/1",
     "recipes":  [key, ...],     keys of recipes (H, decimal) that the artifact has, sorted
     "uncached": [key, ...]}     keys of graphs that compile to nothing, at every start (K-15), sorted

A recipe is two files under the names that the bridge gives them. Versions: 1 (first).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from aotgaudi.document import Document, load_document

TEXT_FILE, UNIT_FILE = "graph.txt", "unit.json"

RecipeKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,20}\z")]


class HpuUnit(Document):
    """See the module."""

    schema_: Literal["aotgaudi.hpu-unit/1"] = Field(default="aotgaudi.hpu-unit/1", alias="schema")
    recipes: tuple[RecipeKey, ...]
    uncached: tuple[RecipeKey, ...] = ()


def read_unit(files: Mapping[str, Path]) -> tuple[str, HpuUnit]:
    """Returns the text and the descriptor of an artifact. Raises ManifestError."""
    unit = load_document(files[UNIT_FILE].read_bytes(), HpuUnit, UNIT_FILE)
    return files[TEXT_FILE].read_text(encoding="utf-8"), unit


def arity_of(text: bytes, /) -> tuple[int, int] | None:
    """Returns how many inputs and outputs a unit's text has; None if it is no such text."""
    lines = text.splitlines()
    try:
        _, outputs = json.loads(lines[-1])
        return sum(line.startswith(b'["input",') for line in lines), len(outputs)
    except (IndexError, TypeError, ValueError, RecursionError):
        return None
