"""What software a Gaudi machine compiles with: versions, and digests of every library that decides what comes out.

The bridge names a recipe by Synapse's version alone: its own digest of the libraries is the same whatever they hold
(K-38, ``cache_version.cpp``). So we hash them ourselves: the bridge and its Python, the graph compiler,
the kernels. That is much to read, so a digest is remembered for a file that has not changed since (its inode, size and
both times).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.digest import canonical_json, sha256_bytes, sha256_file
from aotgaudi.errors import StoreError, TargetError, store_error
from aotgaudi.files import make_directories, write_atomic

PLUGIN = "habana-torch-plugin"
"""The distribution that brings the bridge."""
SYSTEM_LIBRARIES = Path("usr/lib/habanalabs")
KERNELS_VARIABLE = "GC_KERNEL_PATH"
LOADER_VARIABLE = "LD_LIBRARY_PATH"
"""Where the dynamic loader looks first (ld.so(8))."""

_MAX_THREADS = 8
_GRAPH_COMPILER = "libSynapse.so*"
_MEMORY_NAME = "library-digests.json"


@dataclass(frozen=True, slots=True)
class Installation:
    """Where the software lies.

    Attributes:
        plugin: The folder of the Python package ``habana_frameworks``.
        system: The folder of the graph compiler and its libraries: the one that the dynamic loader would take.
        kernels: The libraries that ``GC_KERNEL_PATH`` names.
    """

    plugin: Path
    system: Path
    kernels: tuple[Path, ...]

    @classmethod
    def find(cls, environment: Mapping[str, str], root: Path = Path("/")) -> Installation:
        """Returns where this machine's software lies. Imports none of it.

        Raises:
            TargetError: the bridge is not installed.
        """
        spec = importlib.util.find_spec("habana_frameworks")
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            raise TargetError(
                f"target: {PLUGIN} is not installed here (it comes with Intel's images for Gaudi)"
            )
        kernels = tuple(Path(part) for part in environment.get(KERNELS_VARIABLE, "").split(":") if part)
        searched = (Path(part) for part in environment.get(LOADER_VARIABLE, "").split(":") if part)
        ahead = (folder for folder in searched if any(folder.glob(_GRAPH_COMPILER)))
        return cls(Path(places[0]), next(ahead, root / SYSTEM_LIBRARIES), kernels)

    def components(self) -> Mapping[str, tuple[Path, ...]]:
        """Returns the files of each component of a key, in order of names.

        Raises:
            TargetError: a component has no file: what would compile is not there.
        """
        torch = self.plugin / "torch"
        found = {
            "bridge": _files(torch / "lib", "libhabana_pytorch*.so*"),
            "bridge-python": _files(torch / "dynamo", "**/*.py"),
            "graph-compiler": _files(self.system, _GRAPH_COMPILER),
            "kernels": (
                *_files(self.system, "libtpc_fuser*.so*"),
                *_files(self.system, "lib*complex_guid*.so*"),
                *self._kernels(),
            ),
        }
        for name, files in found.items():
            if not files:
                raise TargetError(f"target: the {name} of the Gaudi software was not found on this machine")
        return found

    def _kernels(self) -> tuple[Path, ...]:
        missing = [path for path in self.kernels if not path.is_file()]
        if missing:
            raise TargetError(f"target: {KERNELS_VARIABLE} names {missing[0]}, which is not there")
        return self.kernels or _files(self.system, "libtpc_kernels*.so*")


@dataclass(frozen=True, slots=True)
class LibraryDigests:
    """The digest of each component: sha256 over the names and the sha256 of its files, sorted by name."""

    components: Mapping[str, str]

    @classmethod
    def of(cls, components: Mapping[str, Sequence[Path]], memory: DigestMemory) -> LibraryDigests:
        """Hashes every file, in threads; those that `memory` knows are not read.

        Raises:
            StoreError: a file cannot be read.
        """
        digests = memory.digests(sorted({path for files in components.values() for path in files}))
        return cls(
            {
                name: sha256_bytes(canonical_json(sorted([path.name, digests[path]] for path in files)))
                for name, files in components.items()
            }
        )


class DigestMemory:
    """Remembers digests of files by path, for as long as a file's inode, size and times stay the same.

    It is a saving of time alone: where it cannot be read or written, files are hashed again.
    """

    def __init__(self, directory: Path | None, hash_file: Callable[[Path], str] = sha256_file) -> None:
        """Keeps what it knows in `directory`, which is made when there is something to keep; None: keeps nothing."""
        self._path = None if directory is None else directory / _MEMORY_NAME
        self._hash_file = hash_file

    def digests(self, paths: Iterable[Path]) -> Mapping[Path, str]:
        """Returns the sha256 of every file. Raises StoreError where one cannot be read."""
        stamps = {path: _stamp(path) for path in paths}
        known = self._read()
        fresh = {path: known[str(path)][1] for path, stamp in stamps.items() if _is_known(known, path, stamp)}
        unknown = [path for path in stamps if path not in fresh]
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            fresh |= dict(zip(unknown, pool.map(self._hashed, unknown), strict=True))
        if unknown:
            self._write({**known, **{str(path): (stamps[path], fresh[path]) for path in unknown}})
        return fresh

    def _hashed(self, path: Path) -> str:
        try:
            return self._hash_file(path)
        except OSError as error:
            raise store_error("read", path, error) from error

    def _read(self) -> dict[str, tuple[list[int], str]]:
        if self._path is None:
            return {}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            rows = json.loads(self._path.read_bytes())
            return {str(path): ([int(part) for part in stamp], str(digest)) for path, stamp, digest in rows}
        return {}

    def _write(self, known: Mapping[str, tuple[list[int], str]]) -> None:
        if self._path is None:
            return
        rows = [[path, stamp, digest] for path, (stamp, digest) in sorted(known.items())]
        with contextlib.suppress(OSError, StoreError):
            make_directories(self._path.parent)
            write_atomic(self._path, json.dumps(rows).encode())


def _is_known(known: Mapping[str, tuple[list[int], str]], path: Path, stamp: list[int]) -> bool:
    return str(path) in known and known[str(path)][0] == stamp


def _stamp(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError as error:
        raise store_error("read", path, error) from error
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _files(folder: Path, pattern: str) -> tuple[Path, ...]:
    """The regular files of a folder, each once: libraries have links with their versions beside them."""
    found = {path.resolve() for path in folder.glob(pattern) if path.is_file()}
    return tuple(sorted(found))


def python_version() -> str:
    """Returns ``major.minor`` of this interpreter, by which the bridge's libraries differ."""
    return ".".join(platform.python_version_tuple()[:2])
