"""Reads why two starts of a plain vLLM did not share a compile cache, from what vLLM wrote down there.

A cache is a folder ``torch_compile_cache/HASH``. Its ``rank_R_D/PREFIX/cache_key_factors.json`` holds what HASH is made of:
the variables, and digests of the configuration, the traced sources and the compiler (``vllm/compilation/backends.py`` of
0.32.0, `VllmBackend.__call__`). We read that file alone, as JSON. The others are code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from aotgaudi.commands.variables import is_secret, without_credentials
from aotgaudi.digest import differing
from aotgaudi.document import load_foreign_object
from aotgaudi.files import read_regular
from aotgaudi.wrap.launch_comparison import Difference

FACTORS_NAME = "cache_key_factors.json"
_RANKS = [f"{above}rank_*/{below}" for above in ("", "*/", "torch_compile_cache/*/") for below in ("", "*/")]
_PLACES = ("", "*/", *_RANKS)
"""Where the file lies below the folder of a rank, of a hash, of all hashes, or vLLM's own."""
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CompileCache:
    """The cache in `path`, when vLLM made it (UTC), and what it hashed: dotted name -> value.

    A factor that differs between ranks, or between the models of a server, is there once more, by the place of its file.
    """

    path: Path
    made: str
    factors: Mapping[str, str]

    def differences(self, older: CompileCache) -> tuple[Difference, ...]:
        """Returns the factors that differ, without secrets; those of `older` come first."""
        rows = differing(older.factors, self.factors)
        return tuple(Difference(name, *(_public(name, value) for value in values)) for name, *values in rows)


def find_compile_caches(folder: Path) -> tuple[CompileCache, ...]:
    """Returns vLLM's caches in `folder`, newest first; () if no factors lie there. Raises SpecError for other content."""
    files: dict[Path, list[Path]] = {}
    found = {path.absolute() for place in _PLACES for path in folder.glob(place + FACTORS_NAME)}
    for path in filter(Path.exists, sorted(found)):
        above_ranks = (up.parent for up in path.parents if up.name.startswith("rank_"))
        files.setdefault(next(above_ranks, path.parent), []).append(path)
    newest = sorted(files.items(), key=lambda item: -os.lstat(item[1][0]).st_mtime)
    return tuple(_read(home, paths) for home, paths in newest)


def _read(home: Path, files: list[Path]) -> CompileCache:
    factors: dict[str, str] = {}
    for path in files:
        data = read_regular(path, _MAX_BYTES)
        for name, value in _flat(load_foreign_object(data, str(path)), ""):
            if factors.setdefault(name, value) != value:
                factors[f"{path.parent.relative_to(home).as_posix()}.{name}"] = value
    made = datetime.fromtimestamp(os.lstat(files[0]).st_mtime, timezone.utc)
    return CompileCache(home, f"{made:%Y-%m-%d %H:%M} UTC", factors)


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{_printable(name)}.")
        else:
            yield prefix + _printable(name), _printable(value)


def _printable(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _public(name: str, value: str | None) -> str | None:
    is_shown = value is None or not is_secret(name.rpartition(".")[2])
    return value and without_credentials(value) if is_shown else "(a secret)"
