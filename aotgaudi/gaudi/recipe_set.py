"""Recipes that belong together: what they were compiled for, their digests, and a directory made of them.

The bridge finds a recipe by its name alone and verifies nothing (K-29, K-38), and one for another type of device fails
when it is launched (K-28). So all of that is compared before a process that would use them starts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, SpecError, TargetError, store_error
from aotgaudi.gaudi.inventory import DeviceType
from aotgaudi.gaudi.recipes import RecipeName

_CHUNK_BYTES = 1 << 20
_KINDS = frozenset({"recipe", "metadata"})


@dataclass(frozen=True, slots=True)
class RecipeSet:
    """Complete pairs, all of one version of the software and for one type of device.

    Attributes:
        device_type: What they were compiled for.
        synapse: V of all names.
        libraries: L of all names.
        files: Name -> digest.

    Raises:
        CorruptError: a file of a pair is missing, or a name is of something else or of another version.
    """

    device_type: DeviceType
    synapse: str
    libraries: str
    files: Mapping[str, Digest]

    def __post_init__(self) -> None:
        kinds: defaultdict[str, set[str]] = defaultdict(set)
        for name in self.files:
            parsed = RecipeName.parse(name)
            if parsed is None or str(parsed) != name:
                raise CorruptError(
                    f"{name}: is not the name of a recipe's file, and recipes alone can be restored"
                )
            for noun, found, wanted in (
                ("synapse", parsed.synapse, self.synapse),
                ("libraries", parsed.libraries, self.libraries),
            ):
                if found != wanted:
                    raise CorruptError(
                        f"{name}: is of another version of {noun} than the others: {found}, not {wanted}"
                    )
            kinds[parsed.key].add(parsed.kind)
        for key, found_kinds in kinds.items():
            for missing in _KINDS - found_kinds:
                raise CorruptError(f"recipe {key}: its {missing} is missing")

    @classmethod
    def of(
        cls, device_type: DeviceType, files: Mapping[str, Path], keep: Callable[[Path], Digest] | None = None
    ) -> RecipeSet:
        """Returns the set of collected `files`, each of which is read once.

        Args:
            device_type: Of the card that they were compiled for.
            files: Name -> where the bridge has written it.
            keep: Takes a copy of a file and returns its digest, as ``store.objects.put_file`` does, so that what is
                hashed is what is kept; None: files are hashed only.

        Raises:
            CorruptError: as the constructor.
            StoreError: a file cannot be read, or not be kept.
        """
        parsed = next((found for found in map(RecipeName.parse, files) if found is not None), None)
        synapse, libraries = (parsed.synapse, parsed.libraries) if parsed is not None else ("", "")
        digest_of = keep or _digest
        return cls(device_type, synapse, libraries, {name: digest_of(path) for name, path in files.items()})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RecipeSet:
        """Returns what `as_record` wrote. Raises CorruptError for anything else, or as the constructor does."""
        try:
            values = {name: record[name] for name in ("device_type", "synapse", "libraries")}
            files = {str(name): Digest.parse(digest) for name, digest in record["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"a record of recipes is malformed: {error!r}") from error
        if values["device_type"] not in get_args(DeviceType) or not all(map(_is_text, values.values())):
            raise CorruptError(f"a record of recipes is malformed: {values}")
        return cls(**values, files=files)

    def as_record(self) -> dict[str, Any]:
        """Returns the set as JSON: digests as the store's records have them, so that they keep its objects."""
        return {
            "device_type": self.device_type,
            "synapse": self.synapse,
            "libraries": self.libraries,
            "files": {name: str(digest) for name, digest in sorted(self.files.items())},
        }

    @property
    def keys(self) -> tuple[str, ...]:
        """The bridge's keys of the pairs, in order."""
        parsed = (RecipeName.parse(name) for name in self.files)
        return tuple(sorted({found.key for found in parsed if found is not None}, key=int))

    def require_usable(self, device_type: str, synapse: str, libraries: str | None = None) -> None:
        """Raises TargetError, naming what differs, unless a process on such a device would find and run the recipes.

        Args:
            device_type: Of its card.
            synapse: What its device calls its capability.
            libraries: L of a recipe that it compiled; None: not known yet.
        """
        for component, sealed, found in (
            ("machine", self.device_type, device_type),
            ("toolchain.synapse", self.synapse, synapse),
            ("toolchain.libraries", self.libraries, libraries),
        ):
            if self.files and found is not None and sealed != found:
                raise TargetError(
                    f"target.{component}: recipes were compiled for {sealed}, this machine has {found}"
                )


def materialise(objects: Mapping[str, tuple[Digest, Path]], directory: Path) -> None:
    """Makes `directory`, with a copy of every object under its name: files 0444, the directory 0555.

    The bridge then finds every recipe and can add none. What is copied is hashed on the way. After an error nothing of the
    directory is left.

    Args:
        objects: Name of a recipe's file -> its digest, and where to read it.
        directory: Must not exist; its parent should be writable by us alone.

    Raises:
        CorruptError: an object is not what its digest says.
        SpecError: a name is not that of a recipe's file, or the directory exists.
        StoreError: an object cannot be read, or the directory not be written.
    """
    for name in objects:
        parsed = RecipeName.parse(name)
        if parsed is None or str(parsed) != name:
            raise SpecError(name, "is not the name of a recipe's file", "<H>_<L>_syn<V>.recipe or .metadata")
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
            raise store_error("write", directory, error) from error
        raise


def _digest(path: Path) -> Digest:
    state = hashlib.sha256()
    size = sum(len(chunk) for chunk in _chunks(path, state))
    return Digest(state.hexdigest(), size)


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
    """Yields what a file has, and feeds it to `state`. Raises StoreError."""
    try:
        with path.open("rb") as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                state.update(chunk)
                yield chunk
    except OSError as error:
        raise store_error("read", path, error) from error


def _is_text(value: object) -> bool:
    return isinstance(value, str)
