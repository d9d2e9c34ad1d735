"""A cache of vLLM's that nobody sealed: what its files say of themselves. Nothing is unpickled, imported or written.

Sources: vllm/compilation/decorators.py (``torch_aot_compile/HASH/rank_R_D/model``)
and vllm/compilation/backends.py (``HASH/rank_R_D/PREFIX/cache_key_factors.json``) of vLLM
0.32; torch/_dynamo/aot_compile.py and package.py of torch 2.13 (``SystemInfo``, ``SourceInfo``).
"""

from __future__ import annotations

import io
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from aotgaudi.errors import SpecError
from aotgaudi.files import open_regular, read_regular
from aotgaudi.wrap.explain.pickle_strings import MAX_BYTES, PickleStrings, read_pickle_strings

COMPILE_CACHE = "torch_compile_cache"
_AOT = "torch_aot_compile"
_MODEL_INFOS = "modelinfos"
_FACTORS = "cache_key_factors.json"
_RANK = re.compile(r"rank_(\d+)_(\d+)")
_HASH = re.compile(r"[0-9a-f]{10,64}")
_VERSION = re.compile(r"\d+\.\d+(\.\d+)?[\w.+-]*")
_MODULE = re.compile(r"\w+(\.\w+)*")
_PLACE = re.compile(r"(/[^\s'\"\0]{1,400})/torch_compile_cache/torch_aot_compile/[0-9a-f]{64}")
_SITE = re.compile(r"(/[^\s'\"\0]{1,400}/site-packages)/(?:vllm|torch)/")
_MAX_JSON_BYTES = 4 << 20
_MAX_FILES = 200_000
_MOST_BYTES = 32 << 20
"""Of artifacts, about a second's worth; the first one is always read."""
_STOP = b"."
"""The last byte of every pickle."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """One saved model of one rank.

    Attributes:
        path: of the file.
        hash: vLLM's hash, the directory's name.
        rank: which rank it is for.
        size_bytes: of the file.
        strings: what it says.
    """

    path: Path
    hash: str
    rank: int
    size_bytes: int
    strings: PickleStrings

    @property
    def torch(self) -> str | None:
        """The version of torch that made it."""
        return self._version("torch_version")

    @property
    def python(self) -> str | None:
        """The version of Python that made it."""
        return self._version("python_version")

    @property
    def place(self) -> str | None:
        """The cache's directory when it was made."""
        return _first(_PLACE, self.strings.texts)

    @property
    def site_packages(self) -> str | None:
        """Where the packages lay that were traced."""
        return _first(_SITE, self.strings.texts)

    @property
    def sources(self) -> Mapping[str, str]:
        """The modules that were traced, each with the text that its file had (``SourceInfo.inlined_sources``)."""
        texts = self.strings.texts
        start = texts.index("inlined_sources") if "inlined_sources" in texts else len(texts)
        found: dict[str, str] = {}
        module = ""
        for key, value in itertools.pairwise(texts[start:]):
            if key == "module" and _MODULE.fullmatch(value):
                module = value
            elif key == "content" and module:
                found[module] = value
                module = ""
        return found

    def _version(self, key: str) -> str | None:
        """Returns the version that soon follows a member of ``SystemInfo``; torch's is an object of a class of its own."""
        texts = self.strings.texts
        start = texts.index(key) if key in texts else len(texts)
        return next((text for text in texts[start + 1 : start + 4] if _VERSION.fullmatch(text)), None)


@dataclass(frozen=True, slots=True)
class PlainCache:
    """A cache of vLLM's, read.

    Attributes:
        path: of ``VLLM_CACHE_ROOT``.
        num_files: in its compile cache.
        num_bytes: of these.
        artifacts: saved models, by path.
        factors: ``cache_key_factors.json`` of older or other ways to compile, by path.
        architectures: of the models that were served from it.
        is_open: others than its owner may write to it.
    """

    path: Path
    num_files: int
    num_bytes: int
    artifacts: tuple[Artifact, ...]
    factors: Mapping[Path, Mapping[str, Any]]
    architectures: tuple[str, ...]
    is_open: bool


def find_plain_cache(path: Path) -> Path | None:
    """Returns the cache root at `path`, or around it if that is a directory within one; None if there is none."""
    for candidate in (path, *path.parents[:3]):
        if (candidate / COMPILE_CACHE).is_dir() or (candidate / _MODEL_INFOS).is_dir():
            return candidate
    return None


def read_plain_cache(path: Path) -> PlainCache:
    """Reads the cache whose root is `path`. Raises SpecError where it cannot be read."""
    try:
        files = [(file, file.lstat()) for file in _files(path / COMPILE_CACHE)]
        artifacts = tuple(_artifacts(sorted(file for file, _ in files if _is_artifact(file))))
        factors = {file: read_json_object(file) for file, _ in files if file.name == _FACTORS}
        infos = sorted((path / _MODEL_INFOS).glob("*.json"))
        is_open = bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror or error}") from error
    return PlainCache(
        path=path,
        num_files=len(files),
        num_bytes=sum(status.st_size for _, status in files),
        artifacts=artifacts,
        factors=factors,
        architectures=tuple(dict.fromkeys(filter(None, map(_architecture, infos)))),
        is_open=is_open,
    )


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for at, _, names in os.walk(folder):
        for name in names:
            count += 1
            if count > _MAX_FILES:
                raise SpecError(str(folder), f"has more than {_MAX_FILES} files")
            yield Path(at, name)


def _is_artifact(path: Path) -> bool:
    rank, hashed = path.parent, path.parent.parent
    is_named = path.name == "model" and _RANK.fullmatch(rank.name) and _HASH.fullmatch(hashed.name)
    return bool(is_named) and hashed.parent.name == _AOT


def _artifacts(paths: Iterable[Path]) -> Iterator[Artifact]:
    """Yields artifacts. Ranks of one hash say much the same: once enough was read, only the end of others is looked at."""
    num_read = 0
    for path in paths:
        rank = _RANK.fullmatch(path.parent.name)
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            is_read = size <= MAX_BYTES and (num_read == 0 or num_read + size <= _MOST_BYTES)
            strings = read_pickle_strings(file.read(size)) if is_read else _end_of(file, size)
        num_read += size if is_read else 0
        yield Artifact(path, path.parent.parent.name, int(rank[1]) if rank else 0, size, strings)


def _end_of(file: io.FileIO, size: int) -> PickleStrings:
    file.seek(max(0, size - 1))
    return PickleStrings((), frozenset(), is_whole=file.read(1) == _STOP)


def _architecture(path: Path) -> str | None:
    info = read_json_object(path).get("modelinfo")
    name = info.get("architecture") if isinstance(info, dict) else None
    return name if isinstance(name, str) else None


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Returns the object in a JSON file; an empty one where there is none that can be read."""
    try:
        value = from_json(read_regular(path, _MAX_JSON_BYTES))
    except (OSError, ValueError, SpecError):
        return {}
    return value if isinstance(value, dict) else {}


def _first(pattern: re.Pattern[str], texts: Iterable[str]) -> str | None:
    found = (pattern.search(text) for text in texts)
    return next((match[1] for match in found if match), None)
