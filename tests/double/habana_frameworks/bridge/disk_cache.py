"""D-10 to D-13: recipes on disk, where PT_HPU_RECIPE_CACHE_CONFIG says. Stored by one thread, found by name alone.

Source: ``base_cache_file_handler.cpp``, ``cache_file_handler.cpp``, ``hpu_recipe_cache.cpp:296-400``,
``job_thread.h`` and ``recipe_cache_config.cpp`` of the bridge.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import queue
import re
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.profile import PROFILE

_MIB = 1024 * 1024
_SLOW_SECONDS = 0.05
_FILLED = 0.99


@dataclass(frozen=True)
class CacheConfig:
    """D-12: where recipes are kept; `path` is empty where they are not."""

    path: str = ""
    deletes: bool = False
    limit_bytes: int = 1024 * _MIB
    on_nfs: bool = False

    @classmethod
    def read(cls) -> CacheConfig:
        """Returns what the variables say. Ends the process where there are too many fields."""
        value = flags.text("PT_HPU_RECIPE_CACHE_CONFIG")
        if not value and PROFILE.has_legacy_names:
            names = ("PT_RECIPE_CACHE_PATH", "PT_CACHE_FOLDER_DELETE", "PT_CACHE_FOLDER_SIZE_MB")
            value = ",".join(flags.text(name) for name in names)
        fields = value.split(",") if value else []
        most = PROFILE.max_cache_fields
        if len(fields) == most == 4 and has_fault("four-fields"):
            most = 3
        if len(fields) > most:
            sys.stderr.write(f"PT_HPU_RECIPE_CACHE_CONFIG number of fields not in range <1:{most}>\n")
            sys.stderr.flush()
            os.abort()
        path, deletes, limit, nfs = (*fields, *[""] * (4 - len(fields)))
        on_nfs = nfs.lower() in ("1", "true", "t", "yes", "y", "on")
        return cls(
            _ranked(path),
            not on_nfs and deletes.lower() in ("1", "true", "t", "yes", "y", "on"),
            0 if on_nfs else int(limit or 1024) * _MIB,
            on_nfs,
        )

    def prepare(self) -> None:
        """Makes the directory, or empties it. Raises OSError where it cannot be made."""
        if not self.path:
            return
        directory = Path(self.path)
        directory.mkdir(parents=True, exist_ok=True)
        if self.deletes and flags.text("LOCAL_RANK", "0") == "0":
            for path in directory.iterdir():
                if path.is_file():
                    path.unlink()


def _ranked(path: str) -> str:
    rank = flags.text("RANK")
    return path + rank if path and rank and flags.is_on("PT_HPU_INFERENCE_MODE") else path


def libraries_hash() -> str:
    """D-07: L, which should depend on the libraries and on 16 variables, and depends on how many kernel libraries there are.

    In ``cache_version.cpp`` a shadowed variable makes every file's hash 0, and names with trailing spaces never match.
    """
    kernels = [part for part in flags.text("GC_KERNEL_PATH").split(":") if part]
    if kernels and has_fault("fixed-l"):
        import hashlib

        state = hashlib.sha256("\0".join(kernels).encode())
        for path in map(Path, kernels):
            state.update(path.read_bytes() if path.is_file() else b"")
        return state.hexdigest()[:8]
    return format(0x9E3779B9 * (len(kernels) + 1) % 2**32, "x")


def _names_at_import() -> frozenset[str]:
    path = CacheConfig.read().path
    return frozenset(os.listdir(path)) if os.path.isdir(path) else frozenset()


_AT_IMPORT = _names_at_import()


class DiskCache:
    """The directory of recipes."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        config.prepare()
        version = "" if has_fault("other-names") else f"_syn{PROFILE.synapse}"
        self._suffix = f"_{libraries_hash()}{version}"
        self._jobs: queue.Queue[tuple[str, bytes, bytes] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._store_all, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def find(self, key: str) -> bytes | None:
        """Returns the recipe of `key`; None where there is none, or it cannot be read."""
        name = f"{key}{self._suffix}"
        for metadata in self._candidates(f"{name}.metadata"):
            recipe = self._read(
                metadata, metadata.with_name(metadata.name.replace(".metadata", ".recipe", 1))
            )
            if recipe is not None:
                return recipe
        return None

    def store(self, key: str, recipe: bytes, metadata: bytes) -> None:
        """Queues a pair to be written."""
        if self.config.path:
            self._jobs.put((f"{key}{self._suffix}", recipe, metadata))

    def dump(self, name: str, components: Sequence[str]) -> None:
        """Writes what a key is made of beside the recipes (D-26)."""
        if self.config.path:
            text = "\n".join(components)
            Path(self.config.path, f"{name}.hash_content").write_text(f"{text}\n", encoding="utf-8")

    def flush(self) -> None:
        """Blocks until everything is written."""
        self._jobs.join()

    def _end(self) -> None:
        """An orderly end writes what is left; a kill does not."""
        self._jobs.put(None)
        self._thread.join()

    def _candidates(self, name: str) -> Iterator[Path]:
        if not self.config.path:
            return
        path = Path(self.config.path, name)
        if path.exists() and name not in _AT_IMPORT and has_fault("listed-once"):
            return
        yield path
        if self.config.on_nfs:  # Every name of the directory is looked at, by substring.
            with contextlib.suppress(OSError):
                yield from sorted(
                    path for path in Path(self.config.path).iterdir() if path.name.startswith(f"{name}_")
                )
            time.sleep(0.01)

    def _read(self, metadata: Path, recipe: Path) -> bytes | None:
        try:
            descriptor = os.open(metadata, os.O_RDONLY)
        except OSError:
            return None
        try:
            if not self.config.on_nfs:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.stat(recipe.parent).st_mode & 0o200 and has_fault("read-only-fails"):
                raise PermissionError(errno.EACCES, "filesystem error: cannot remove", str(metadata))
            if not os.fstat(descriptor).st_size:
                if has_fault("empty-metadata-fails"):
                    raise RuntimeError("Failed to deserialize recipe")
                warnings.warn(f"{metadata.name}: zero size, removed", stacklevel=2)
                if not os.stat(recipe.parent).st_mode & 0o200:  # Root could; the bridge's other users cannot.
                    raise PermissionError(errno.EACCES, "filesystem error: cannot remove", str(metadata))
                metadata.unlink()
                return None
            try:
                return recipe.read_bytes()
            except OSError:
                return None
        finally:
            os.close(descriptor)

    def _store_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._store(*job)
            except OSError as error:
                warnings.warn(f"a recipe was not stored: {error}", stacklevel=2)
            finally:
                self._jobs.task_done()

    def _store(self, name: str, recipe: bytes, metadata: bytes) -> None:
        writer = f"_{os.getpid()}_{uuid.getnode():012x}" if self.config.on_nfs else ""
        directory = Path(self.config.path)
        if not os.stat(directory).st_mode & 0o200:  # As for a user who is not root.
            raise PermissionError(errno.EACCES, "permission denied", str(directory))
        announced = directory / f"temp_{name}.metadata{writer}"
        if writer:
            announced.touch()
        descriptor = os.open(directory / f"{name}.metadata{writer}", os.O_RDWR | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "r+b") as file:
            if not writer:
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_size:
                return
            if recipe:
                path = directory / f"{name}.recipe{writer}"
                path.write_bytes(recipe[:-1] if has_fault("truncated-recipe") else recipe)
                if has_fault("slow-store"):
                    time.sleep(_SLOW_SECONDS)
                file.write(metadata)
            if has_fault("const-tensor"):
                (directory / f"{name}_const_tensor_0.data").write_bytes(b"\0")
        announced.unlink(missing_ok=True)
        self._evict(directory)

    def _evict(self, directory: Path) -> None:
        """D-13: the oldest pairs go until the rest fits."""
        if not self.config.limit_bytes:
            return
        with open(directory / "eviction.lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            pattern = re.compile(r".*\.recipe(_.*)?")
            recipes = sorted(
                (path for path in directory.iterdir() if pattern.fullmatch(path.name)),
                key=lambda path: path.stat().st_mtime_ns,
            )
            total = sum(path.stat().st_size for path in recipes)
            while recipes and total > self.config.limit_bytes * _FILLED:
                oldest = recipes.pop(0)
                total -= oldest.stat().st_size
                oldest.with_name(oldest.name.replace(".recipe", ".metadata", 1)).unlink(missing_ok=True)
                oldest.unlink()
