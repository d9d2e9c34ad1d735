"""Writing a spec: TOML that ``spec.parse.load_spec`` reads back to an equal spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w

from aotgaudi.files import write_atomic
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.defrag import defragments_by_default
from aotgaudi.spec.sampler import default_settings

_ALWAYS_WRITTEN = ("strategy", "version", "contiguous_pa", "prefix_caching")
"""Keys of the table ``bucketing`` that are written even at their default, since readers look for them."""


def write_spec(path: Path, spec: BuildSpec) -> None:
    """Writes a spec to `path`, and next to it the files that it names: the model's config and a bucket file's text.

    For ``x.toml`` they are ``x.config.json`` and ``x.buckets.txt``. Defaults are left out.

    Raises:
        StoreError: a file cannot be written.
    """
    stem = path.name.removesuffix(".toml")
    tables = spec_tables(spec)
    config = json.dumps(spec.model.config, indent=2, ensure_ascii=False)
    tables["model"]["config"] = _write_beside(path, f"{stem}.config.json", config + "\n")
    text = spec.bucketing.file_text
    if text is not None and "\r" not in text:  # a text file's line ends are read as \n
        del tables["bucketing"]["file_text"]
        tables["bucketing"]["file"] = _write_beside(path, f"{stem}.buckets.txt", text)
    write_atomic(path, tomli_w.dumps(tables).encode("utf-8"))


def spec_tables(spec: BuildSpec) -> dict[str, Any]:
    """Returns the tables of a spec without the defaults; an absent key stands for None."""
    tables = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    bucketing = {name: getattr(spec.bucketing, name) for name in _ALWAYS_WRITTEN}
    if spec.sampler.settings == default_settings(spec.scheduler.engine):
        tables.get("sampler", {}).pop("settings", None)
    else:
        tables.setdefault("sampler", {})["settings"] = spec.sampler.model_dump(mode="json")["settings"]
    tables.setdefault("defrag", {})["enabled"] = spec.defrag.enabled
    default = defragments_by_default(spec.scheduler.engine, spec.target.backend, spec.bucketing.contiguous_pa)
    if spec.defrag.enabled is default:
        del tables["defrag"]["enabled"]
    for name in ("sampler", "defrag"):
        if not tables.get(name, True):
            del tables[name]
    first = {name: tables.pop(name) for name in ("schema", "model", "limits")}
    return {**first, "bucketing": {**bucketing, **tables.pop("bucketing", {})}, **tables}


def _write_beside(path: Path, name: str, text: str) -> str:
    write_atomic(path.with_name(name), text.encode("utf-8"))
    return name
