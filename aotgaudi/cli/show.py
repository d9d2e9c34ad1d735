"""How commands print (text or JSON, sizes and counts in words), and which files they refuse to overwrite."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from aotgaudi.errors import SpecError, StoreError


def emit(document: Any, as_json: bool, text: str | Iterable[str]) -> None:
    """Prints `document` as JSON, or else `text`, which may be an iterable of lines."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(text if isinstance(text, str) else "\n".join(text))


def first_lines(lines: Sequence[str], most: int, more: str) -> list[str]:
    """Returns the first lines, `most` at most, and `more` with the number of the others in it, if there are any."""
    rest = len(lines) - most
    return [*lines[:most], more.format(rest)] if rest > 0 else list(lines)


def size_text(size_bytes: int) -> str:
    """Returns a size for people: ``1.2 GB`` (powers of 1000, as disks are sold)."""
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def refuse_unwritable(path: Path, *inputs: Path | None) -> None:
    """Raises StoreError if a file cannot be written, before the work for it is done.

    Raises SpecError if the path is one of the `inputs`, which are only read, or lies within one, for example a sealed
    bundle.
    """
    for given in inputs:
        if given is not None and path.resolve().is_relative_to(given.resolve()):
            problem = (
                f"would be written into {given}" if given.is_dir() else "is read, and would be written over"
            )
            raise SpecError(str(path), problem, "another file")
    if path.is_dir():
        raise StoreError(f"{path}: cannot be written: it is a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StoreError(f"{path}: cannot be written: {path.parent} is not a writable directory")
