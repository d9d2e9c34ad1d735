"""The files of the bridge's recipe cache: what a directory holds, and taking pairs from it.

A graph that the bridge has compiled is two files, written in this order::

    <H>_<L>_syn<V>.recipe       H: the bridge's key, decimal; L: of its libraries, hex; V: Synapse's version
    <H>_<L>_syn<V>.metadata     with at least one byte: the pair is complete

On a shared file system the bridge appends ``_<pid>_<mac>`` to both names, and announces with an empty ``temp_`` file
what it is compiling. The bridge verifies nothing and writes without fsync or rename, so a directory that it has
written is a source to collect from, once, after its writers have ended; what is kept is named by our own digests.
Source: ``hpu_recipe_cache.cpp`` and ``cache_file_handler.cpp`` of the bridge.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aotgaudi.errors import CompileError, store_error

_NAME = re.compile(
    r"(?P<stem>(?P<key>[0-9]{1,20})_(?P<libraries>[0-9a-f]{1,16})_syn(?P<synapse>[0-9A-Za-z.+-]+?))"
    r"\.(?P<kind>recipe|metadata)(?P<writer>_[0-9]{1,10}_[0-9a-f]{12})?"
)
_LARGEST_KEY = 2**64 - 1
_CONST_TENSOR = re.compile(r".*_const_tensor_.*\.data")
_LEFTOVER_PREFIX = "temp_"
_LEFTOVER_SUFFIXES = (".lock", ".hash_content")


@dataclass(frozen=True, slots=True)
class RecipeName:
    """What the name of a recipe's file says.

    Attributes:
        key: H, decimal; unsigned, 64 bits.
        libraries: L, hex.
        synapse: V, as in ``1.24.1.482.6c1b7a2``.
        kind: ``recipe`` or ``metadata``.
        writer: ``_<pid>_<mac>``, where it was written to a shared file system; else empty.
    """

    key: str
    libraries: str
    synapse: str
    kind: str
    writer: str = ""

    @classmethod
    def parse(cls, name: str) -> RecipeName | None:
        """Returns what `name` says, or None if it is not the name of a recipe's file."""
        match = _NAME.fullmatch(name)
        if match is None or int(match["key"]) > _LARGEST_KEY:
            return None
        return cls(match["key"], match["libraries"], match["synapse"], match["kind"], match["writer"] or "")

    def __str__(self) -> str:
        """The name under which a private directory holds the file, whoever wrote it."""
        return f"{self.key}_{self.libraries}_syn{self.synapse}.{self.kind}"


@dataclass(frozen=True, slots=True)
class RecipePair:
    """The two files of one compiled graph, by the names that a private directory gives them."""

    key: str
    libraries: str
    synapse: str
    recipe: Path
    metadata: Path

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yields both files by name."""
        for kind, path in (("metadata", self.metadata), ("recipe", self.recipe)):
            yield str(RecipeName(self.key, self.libraries, self.synapse, kind)), path


@dataclass(frozen=True, slots=True)
class RecipeDirectory:
    """What a directory of the bridge holds. Everything is in the order of names.

    Attributes:
        path: The directory.
        pairs: The complete ones. Of a graph that several processes wrote to a shared file system, the first one's.
        uncached: Keys whose metadata is empty and which have no complete pair: the graph compiled to nothing (K-15), or
            its writer was killed.
        broken: Name -> what is wrong: one file of two, an empty recipe, something that is not a regular file.
        constants: Names of files with constants. A cache that has any cannot be restored (K-32).
        leftovers: Names of locks, of announcements of graphs being compiled, and of what the bridge's debugging writes.
        others: Names of anything else.
    """

    path: Path
    pairs: tuple[RecipePair, ...] = ()
    uncached: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectedRecipes:
    """The files of the graphs that were asked for, by name, and the keys among them that have none."""

    files: Mapping[str, Path]
    uncached: tuple[str, ...]


def scan(directory: Path) -> RecipeDirectory:
    """Returns what `directory` holds. Opens no file; its writers should have ended.

    Raises:
        StoreError: it cannot be listed.
    """
    sorter = _Sorter(directory)
    try:
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                with contextlib.suppress(FileNotFoundError):  # Evicted, or a temporary file, while we look.
                    sorter.add(entry.name, entry.stat(follow_symlinks=False))
    except OSError as error:
        raise store_error("list", directory, error) from error
    return sorter.sorted()


def collect(directory: Path, keys: Iterable[str] | None = None) -> CollectedRecipes:
    """Returns the files of the graphs that the bridge knows by `keys` (H, decimal); None: of all that are there.

    A key whose graph compiled to nothing has no files and is `uncached`: the bridge compiles it at every start.

    Raises:
        CompileError: a key has no complete pair, without `keys` any graph has none, or the directory holds what cannot be
            restored: constants, or recipes of several versions of the bridge's libraries.
        StoreError: the directory cannot be listed.
    """
    found = scan(directory)
    _check_restorable(found)
    pairs = {pair.key: pair for pair in found.pairs}
    if keys is None:
        half = (name.partition("_")[0] for name in found.broken)
        keys = (*pairs, *found.uncached, *half)
    wanted = sorted(set(keys), key=int)
    for key in wanted:
        if key not in pairs and key not in found.uncached:
            raise CompileError(f"{directory}: recipe {key} {_why_missing(found, key)}")
    files = {name: path for key in wanted if key in pairs for name, path in pairs[key].files()}
    return CollectedRecipes(files, tuple(key for key in wanted if key not in pairs))


def find_directories(configured: Path) -> tuple[Path, ...]:
    """Returns the directories that the bridge may have written to when told to use `configured`, which may be missing.

    In inference mode it appends the rank to the text of the path: ``/c`` becomes ``/c0``, ``/c/`` becomes ``/c/0``
    (``recipe_cache_config.cpp``).
    """
    beside = [path for path in _children(configured.parent) if _is_ranked(path.name, configured.name)]
    inside = [path for path in _children(configured) if path.name.isdecimal()]
    itself = [configured] if configured.is_dir() else []
    return (*itself, *sorted(beside), *sorted(inside))


class _Sorter:
    """Takes the names of a directory in order, and tells what they are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: defaultdict[tuple[str, str, str, str], dict[str, tuple[str, int]]] = defaultdict(dict)
        self._broken: dict[str, str] = {}
        self._constants: list[str] = []
        self._leftovers: list[str] = []
        self._others: list[str] = []

    def add(self, name: str, status: os.stat_result) -> None:
        parsed = RecipeName.parse(name)
        if parsed is None:
            self._kind_of(name).append(name)
        elif not stat.S_ISREG(status.st_mode):
            self._broken[name] = "not a regular file"
        else:
            graph = (parsed.key, parsed.libraries, parsed.synapse, parsed.writer)
            self._sizes[graph][parsed.kind] = (name, status.st_size)

    def _kind_of(self, name: str) -> list[str]:
        if _CONST_TENSOR.fullmatch(name):
            return self._constants
        is_leftover = name.startswith(_LEFTOVER_PREFIX) or name.endswith(_LEFTOVER_SUFFIXES)
        return self._leftovers if is_leftover else self._others

    def sorted(self) -> RecipeDirectory:
        pairs: dict[tuple[str, str, str], RecipePair] = {}
        empty: set[str] = set()
        for (*graph, _), files in sorted(self._sizes.items(), key=_order):
            key, libraries, synapse = graph
            problem = _problem(files)
            if problem is None:
                recipe, metadata = (self._path / files[kind][0] for kind in ("recipe", "metadata"))
                pairs.setdefault(
                    (key, libraries, synapse), RecipePair(key, libraries, synapse, recipe, metadata)
                )
            elif not problem:
                empty.add(key)
            else:
                self._broken.update({name: problem for name, _ in files.values()})
        return RecipeDirectory(
            path=self._path,
            pairs=tuple(pairs.values()),
            uncached=tuple(sorted(empty - {key for key, _, _ in pairs}, key=int)),
            broken=dict(sorted(self._broken.items())),
            constants=tuple(self._constants),
            leftovers=tuple(self._leftovers),
            others=tuple(self._others),
        )


def _order(item: tuple[tuple[str, str, str, str], object]) -> tuple[int, tuple[str, ...]]:
    (key, *rest), _ = item
    return int(key), tuple(rest)


def _problem(files: Mapping[str, tuple[str, int]]) -> str | None:
    """None for a complete pair, "" for a graph without a recipe, else what is wrong."""
    recipe, metadata = files.get("recipe"), files.get("metadata")
    if metadata is None:
        return "has no metadata: its writer was killed before the pair was complete"
    if recipe is None:
        return "has metadata and no recipe" if metadata[1] else ""
    if not metadata[1]:
        return "has an empty metadata: its writer was killed before the pair was complete"
    return None if recipe[1] else "has an empty recipe"


def _check_restorable(found: RecipeDirectory) -> None:
    if found.constants:
        raise CompileError(
            f"{found.path}: holds constants ({found.constants[0]}), so a copy of it would not load"
            " (unset PT_HPU_COMPILE_GRAPH_FREEZE and what marks weights as constants)"
        )
    for noun, values in (
        ("libraries", {pair.libraries for pair in found.pairs}),
        ("Synapse", {pair.synapse for pair in found.pairs}),
    ):
        if len(values) > 1:
            raise CompileError(
                f"{found.path}: holds recipes of several versions of {noun}: {', '.join(sorted(values))}"
                " (build into an empty directory)"
            )


def _why_missing(found: RecipeDirectory, key: str) -> str:
    problems = [f"{problem} ({name})" for name, problem in found.broken.items() if name.startswith(f"{key}_")]
    if problems:
        return problems[0]
    return "is not there: it was not stored before its process ended, or it was evicted"


def _children(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []  # No such directory: the bridge has written nothing there.


def _is_ranked(name: str, configured: str) -> bool:
    return name.startswith(configured) and name[len(configured) :].isdecimal()
