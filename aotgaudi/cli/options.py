"""Options that several commands share, and where their defaults come from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from aotgaudi.errors import ManifestError, SpecError, StoreError
from aotgaudi.manifest.codec import read_manifest
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec

Command = Callable[..., Any]


def store_option(function: Command) -> Command:
    """``--store DIR``, else $AOTGAUDI_STORE, else the user's cache directory."""
    return click.option(
        "--store",
        "store_root",
        type=click.Path(path_type=Path),
        envvar="AOTGAUDI_STORE",
        default=default_store_root,
        metavar="DIR",
        help="The store  [default: $AOTGAUDI_STORE or ~/.cache/aotgaudi]",
    )(function)


def jobs_option(function: Command) -> Command:
    """``-j N``: worker processes, one a core by default."""
    return click.option(
        "-j",
        "--jobs",
        type=click.IntRange(min=1),
        default=available_cores,
        metavar="N",
        help="Worker processes  [default: one a core]",
    )(function)


def default_store_root() -> Path:
    """Returns ``$XDG_CACHE_HOME/aotgaudi`` or ``~/.cache/aotgaudi``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "aotgaudi"


def available_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load_manifest_or_spec(path: Path) -> Manifest:
    """Reads a manifest file, or enumerates a spec (``.toml``). Raises SpecError or ManifestError."""
    if path.is_dir():
        raise SpecError(str(path), "is a directory", "a spec (.toml) or a manifest (.manifest.json)")
    if path.suffix == ".toml":
        return Manifest.of(load_spec(path))
    if not path.exists():
        raise ManifestError(f"{path}: there is no such file (a manifest or a spec)")
    return read_manifest(path)


def refuse_unwritable(path: Path) -> None:
    """Raises StoreError where a file cannot be written, before the work that it is to hold is done."""
    if path.is_dir():
        raise StoreError(f"{path}: cannot be written: it is a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StoreError(f"{path}: cannot be written: {path.parent} is no directory that can be written to")
