"""The recipe caches of a server that has ended, put in order: complete pairs under the names that every bridge finds.

The bridge stores in a thread, without rename or checksum (K-26, K-35), so a cache may hold a pair that was cut, and one on
a shared file system has the writer in its names (``hpu_recipe_cache.cpp``). What is captured is looked through here first;
the bridge itself would take such a recipe for a miss, and compile it again without a word.
"""

from __future__ import annotations

from pathlib import Path

from aotgaudi.errors import CompileError, store_error
from aotgaudi.gaudi.recipes import RecipeDirectory, find_directories, scan


def settle(configured: Path) -> tuple[Path, ...]:
    """Puts every directory in order that ranks told to use `configured` have written, and returns them.

    Names lose their writer; of a graph that several have written one pair is kept; locks, announcements and the marks of
    graphs that compiled to nothing go.

    Raises:
        CompileError: a recipe was cut, or cannot be restored: constants, or several versions of the bridge's libraries.
        StoreError: a directory cannot be read or written.
    """
    directories = find_directories(configured)
    for directory in directories:
        found = scan(directory)
        _require_whole(found)
        try:
            _tidy(found)
        except OSError as error:
            raise store_error("put in order", directory, error) from error
    return directories


def _require_whole(found: RecipeDirectory) -> None:
    if found.broken:
        name, problem = next(iter(found.broken.items()))
        others = f" (and {len(found.broken) - 1} more)" if len(found.broken) > 1 else ""
        raise CompileError(
            f"{found.path}: {name} {problem}{others}: the server must end before it is stopped"
        )
    if found.constants:
        raise CompileError(
            f"{found.path}: holds constants ({found.constants[0]}), so a copy of it would not load"
            " (unset PT_HPU_COMPILE_GRAPH_FREEZE and what marks weights as constants)"
        )
    versions = sorted({(pair.synapse, pair.libraries) for pair in found.pairs})
    if len(versions) > 1:
        raise CompileError(f"{found.path}: holds recipes of several versions: {versions[0]}, {versions[1]}")


def _tidy(found: RecipeDirectory) -> None:
    kept = {path for pair in found.pairs for _, path in pair.files()}
    unwanted = {found.path / name for name in found.leftovers}
    unwanted |= {path for path in found.path.glob("*_syn*") if path not in kept and path.is_file()}
    for path in unwanted:
        path.unlink(missing_ok=True)
    for pair in found.pairs:
        for name, path in pair.files():
            path.rename(found.path / name)
