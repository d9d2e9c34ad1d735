"""The bridge's recipes on disk: names, complete pairs, collecting by key, sets, restoring, waiting until they are stored.

The bridge writes a compiled graph as two files, in this order::

    <H>_<L>_syn<V>.recipe       H: the bridge's key, decimal; L: of its libraries, hex; V: Synapse's version
    <H>_<L>_syn<V>.metadata     with at least one byte: the pair is complete

On a shared file system it appends ``_<pid>_<mac>`` to both names, and announces what it is compiling with an empty ``temp_``
file. It writes without fsync or rename, in a thread, and a kill loses what is queued (K-35). So we use a directory that it
has written only as a source: we collect from it once, after its writers have ended, and name what we keep by our own
digests.

It finds a recipe by its name alone and verifies nothing (K-29, K-38). A recipe for another type of device fails only when it
is launched (K-28). So we compare all of that before we start a process that would use recipes.
Sources: ``hpu_recipe_cache.cpp``, ``cache_file_handler.cpp``, ``job_thread.h`` and ``utils/debug/__init__.py``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import CompileError, CorruptError, SpecError, StoreError, store_error, store_errors

_NAME = re.compile(
    r"(?P<stem>(?P<key>[0-9]{1,20})_(?P<libraries>[0-9a-f]{1,16})_syn(?P<synapse>[0-9A-Za-z.+-]+?))"
    r"\.(?P<kind>recipe|metadata)(?P<writer>_[0-9]{1,10}_[0-9a-f]{12})?"
)
_LARGEST_KEY = 2**64 - 1
_CONST_TENSOR = re.compile(r".*_const_tensor_.*\.data")
_LEAST_BYTES = 1 << 20
"""With less room, recipes are lost sooner or later: one of a real layer has megabytes."""

_LEFTOVER_PREFIX = "temp_"
_LEFTOVER_SUFFIXES = (".lock", ".hash_content")


@dataclass(frozen=True, slots=True)
class RecipeName:
    """The parts of the name of a recipe's file.

    Attributes:
        key: H, decimal; unsigned, 64 bits.
        libraries: L, hex.
        synapse: V, as in ``1.24.1.482.6c1b7a2``.
        kind: ``recipe`` or ``metadata``.
        writer: ``_<pid>_<mac>`` if it was written to a shared file system; else empty.
    """

    key: str
    libraries: str
    synapse: str
    kind: str
    writer: str = ""

    @classmethod
    def parse(cls, name: str) -> RecipeName | None:
        """Returns the parts of `name`, or None if it is not the name of a recipe's file."""
        match = _NAME.fullmatch(name)
        if match is None or int(match["key"]) > _LARGEST_KEY:
            return None
        return cls(match["key"], match["libraries"], match["synapse"], match["kind"], match["writer"] or "")

    def __str__(self) -> str:
        """The name of the file in a private directory, which omits the writer."""
        return f"{self.key}_{self.libraries}_syn{self.synapse}.{self.kind}"


@dataclass(frozen=True, slots=True)
class RecipePair:
    """The two files of one compiled graph, with their names in a private directory."""

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
        pairs: Complete pairs. If several processes wrote one graph to a shared file system, that of the first one.
        uncached: Keys whose metadata is empty and which have no complete pair: the graph compiled to nothing (K-15), or its
            writer was killed, or could not write.
        broken: Name -> what is wrong: one file of two, an empty recipe, something that is not a regular file.
        constants: Names of files with constants. A cache that has any cannot be restored (K-32).
        leftovers: Names of locks, of announcements of graphs being compiled, and of files that the bridge's debugging
            writes.
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
    """The files of the requested graphs, by name, and the requested keys that have none."""

    files: Mapping[str, Path]
    uncached: tuple[str, ...]


def scan(directory: Path) -> RecipeDirectory:
    """Returns what `directory` holds. Opens no file. Its writers should have ended.

    Raises:
        StoreError: it cannot be listed.
    """
    sorter = _Sorter(directory)
    with store_errors("list", directory), os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            with contextlib.suppress(FileNotFoundError):  # Evicted, or a temporary file, during the scan.
                sorter.add(entry.name, entry.stat(follow_symlinks=False))
    return sorter.sorted()


def collect(directory: Path, keys: Iterable[str] | None = None) -> CollectedRecipes:
    """Returns the files of the graphs with these `keys` (H, decimal); None: of all graphs.

    A key whose graph compiled to nothing has no files and is `uncached`: the bridge compiles it at every start.

    Raises:
        CompileError: a key (without `keys`, any graph) has no complete pair, or the directory cannot be restored, because it
            holds constants, or recipes of several versions of the bridge's libraries.
        StoreError: the directory cannot be listed, or lacks a recipe because it takes no more data.
    """
    found = scan(directory)
    require_restorable(found)
    pairs = {pair.key: pair for pair in found.pairs}
    if keys is None:
        half = (name.partition("_")[0] for name in found.broken)
        keys = (*pairs, *found.uncached, *half)
    wanted = sorted(set(keys), key=int)
    for key in wanted:
        if key not in pairs:
            require_room(
                directory, f"recipe {key}"
            )  # Also an empty metadata may be all that a full disk took.
            if key not in found.uncached:
                raise CompileError(f"{directory}: recipe {key} {_why_missing(found, key)}")
    files = {name: path for key in wanted if key in pairs for name, path in pairs[key].files()}
    return CollectedRecipes(files, tuple(key for key in wanted if key not in pairs))


def find_directories(configured: Path) -> tuple[Path, ...]:
    """Returns the directories to which the bridge may have written if `configured` was set. That one may be missing.

    In inference mode it appends the rank to the text of the path: ``/c`` becomes ``/c0``, ``/c/`` becomes ``/c/0``
    (``recipe_cache_config.cpp``).
    """
    beside = [path for path in _children(configured.parent) if _is_ranked(path.name, configured.name)]
    inside = [path for path in _children(configured) if path.name.isdecimal()]
    itself = [configured] if configured.is_dir() else []
    return (*itself, *sorted(beside), *sorted(inside))


class _Sorter:
    """Takes the names of a directory in order, and classifies them."""

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


_CUT = "its writer was killed, or could not write, before the pair was complete"


def _problem(files: Mapping[str, tuple[str, int]]) -> str | None:
    """Returns None for a complete pair, "" for a graph without a recipe, else what is wrong."""
    recipe, metadata = files.get("recipe"), files.get("metadata")
    if metadata is None:
        return f"has no metadata: {_CUT}"
    if recipe is None:
        return "has metadata and no recipe" if metadata[1] else ""
    if not metadata[1]:
        return f"has an empty metadata: {_CUT}"
    return None if recipe[1] else "has an empty recipe"


def require_restorable(found: RecipeDirectory) -> None:
    """Raises CompileError if a copy of the directory would not load: it holds constants, or recipes of several versions."""
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


def require_room(directory: Path, what: str) -> None:
    """Raises StoreError, as the reason why `what` is not there, if the file system of `directory` takes no more data.

    The bridge says so only in its own log.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _LEAST_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return
        status = os.statvfs(directory)
        raise StoreError(
            f"{what} could not be written to {directory}: {os.strerror(error.errno)} (at least {_LEAST_BYTES:,} bytes are"
            f" needed, {status.f_bavail * status.f_frsize:,} are free: free space there, or use another place)"
        ) from error


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


_CHUNK_BYTES = 1 << 20
_KINDS = frozenset({"recipe", "metadata"})


def require_one_set(names: Iterable[str]) -> str | None:
    """Returns Synapse's version in the names of recipes' files; None without any.

    Raises CorruptError unless they are complete pairs, all of one version of Synapse and of the libraries.
    """
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    first: RecipeName | None = None
    for name in names:
        parsed = _required(name)
        first = first or parsed
        for noun, found, wanted in (
            ("synapse", parsed.synapse, first.synapse),
            ("libraries", parsed.libraries, first.libraries),
        ):
            if found != wanted:
                raise CorruptError(
                    f"{name}: is of another version of {noun} than the others: {found}, not {wanted}"
                )
        kinds[parsed.key].add(parsed.kind)
    for key, found_kinds in kinds.items():
        for missing in _KINDS - found_kinds:
            raise CorruptError(f"recipe {key}: its {missing} is missing")
    return None if first is None else first.synapse


def _required(name: str) -> RecipeName:
    parsed = RecipeName.parse(name)
    if parsed is None or str(parsed) != name:
        raise CorruptError(f"{name}: is not the name of a recipe's file, and only recipes can be restored")
    return parsed


def materialise(objects: Mapping[str, tuple[Digest, Path]], directory: Path) -> None:
    """Makes `directory`, with a copy of every object under its name: files 0444, the directory 0555.

    The bridge then finds every recipe and cannot add any. Copies are hashed on the way. After an error the directory is
    removed.

    Args:
        objects: Name of a recipe's file -> its digest, and the path to read it from.
        directory: Must not exist. Only we should be able to write to its parent.

    Raises:
        CorruptError: an object does not match its digest, or a name is not that of a recipe's file.
        SpecError: the directory exists.
        StoreError: an object cannot be read, or the directory cannot be written.
    """
    for name in objects:
        _required(name)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError as error:
        raise SpecError(str(directory), "exists already", "a new directory") from error
    except OSError as error:
        raise store_error("make", directory, error) from error
    try:
        for name, (digest, source) in objects.items():
            _copy(source, digest, directory / name)
        directory.chmod(0o555)
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError):
            needed_bytes = sum(digest.size_bytes for digest, _ in objects.values())
            raise store_error("write", directory, error, needed_bytes=needed_bytes) from error
        raise


def _copy(source: Path, digest: Digest, destination: Path) -> None:
    state = hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(destination, flags, 0o600), "wb") as writer:
        size = sum(writer.write(chunk) for chunk in _chunks(source, state))
        os.fchmod(writer.fileno(), 0o444)
    found = Digest(state.hexdigest(), size)
    if found != digest:
        raise CorruptError(f"{destination.name}: is {found}, should be {digest}")


def _chunks(path: Path, state: hashlib._Hash) -> Iterator[bytes]:
    """Yields the chunks of a file, and feeds them to `state`. Raises StoreError."""
    with store_errors("read", path), path.open("rb") as reader:
        while chunk := reader.read(_CHUNK_BYTES):
            state.update(chunk)
            yield chunk


_SETTLED_SECONDS = 1.0
_LONGEST_SECONDS = 10.0


def flush_recipes(debug: object, directory: Path) -> bool:
    """Waits until every recipe is stored in `directory`. Returns whether the bridge has a flush.

    Without a flush, this waits until nothing has changed there for a second, at most ten seconds. Only an orderly end of the
    process then shows what was stored. Every process that compiles calls this before it ends.

    Args:
        debug: The module ``habana_frameworks.torch.utils.debug``, imported by the caller.
        directory: The directory of the recipes, which may be missing.

    Raises:
        StoreError: the directory cannot be listed.
    """
    flush = getattr(debug, "_flush_disk_cache", None)
    if flush is not None:
        flush()
        return True
    deadline, before = time.monotonic() + _LONGEST_SECONDS, None
    while before != (now := _sizes(directory)) and time.monotonic() < deadline:
        before = now
        time.sleep(_SETTLED_SECONDS)
    return False


def _sizes(directory: Path) -> dict[str, int]:
    try:
        return {path.name: path.stat().st_size for path in directory.iterdir()}
    except FileNotFoundError:
        return {}  # Not made yet, or a temporary file disappeared.
    except OSError as error:
        raise store_error("list", directory, error) from error
