"""Reads why two starts of a plain vLLM did not share a compile cache, from what vLLM wrote down there.

``torch_compile_cache/HASH/rank_R_D/PREFIX/cache_key_factors.json`` holds what HASH is made of: the variables, and digests of
the configuration, the traced sources and the compiler (``vllm/compilation/backends.py`` of 0.32.0, `VllmBackend.__call__`).
A server's first model decides HASH. We read its file alone, as JSON. The other files of a cache are code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from aotgaudi.commands.variables import is_secret, without_credentials
from aotgaudi.digest import differing
from aotgaudi.document import load_foreign_object
from aotgaudi.files import read_regular
from aotgaudi.wrap.launch_comparison import Difference

FACTORS_NAME = "cache_key_factors.json"
_MAX_BYTES, _MAX_DEPTH = 4 << 20, 4


class CompileCache(NamedTuple):
    """A cache's folder, when vLLM made it (UTC), and what its hash is made of: dotted name -> value, with secrets."""

    path: Path
    made: str
    factors: Mapping[str, str]

    def differences(self, older: CompileCache) -> list[Difference]:
        """Returns the factors that differ, without secrets; those of `older` come first."""
        rows = differing(older.factors, self.factors)
        return [Difference(name, *(_public(name, value) for value in values)) for name, *values in rows]


def find_compile_caches(folder: Path) -> list[CompileCache]:
    """Returns vLLM's caches in `folder`, newest first. Raises SpecError for other content."""
    places = ("*/" * depth + FACTORS_NAME for depth in range(_MAX_DEPTH + 1))
    files = {path for place in places for path in folder.absolute().glob(place) if path.is_file()}
    first = {[*path.parents][:3][-1]: path for path in sorted(files, reverse=True)}
    found = []
    for home, path in sorted(first.items(), key=lambda item: -item[1].stat().st_mtime):
        made = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        table = load_foreign_object(read_regular(path, _MAX_BYTES), str(path))
        found.append(CompileCache(home, f"{made:%Y-%m-%d %H:%M} UTC", dict(_flat(table))))
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        here = prefix + _printable(name)
        yield from _flat(value, f"{here}.") if isinstance(value, dict) else [(here, _printable(value))]


def _printable(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _public(name: str, value: str | None) -> str | None:
    is_shown = value is None or not is_secret(name.rpartition(".")[2])
    return value and without_credentials(value) if is_shown else "(a secret)"
