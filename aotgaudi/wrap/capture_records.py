"""The store's records of captures, and the keys that find them. A record is a miss if one of its objects is missing.

* capture key -> `CaptureRow`: a proved capture, and how long its build took. The first record stays.
* shard key -> `UnprovenRow`, without answers: the files of a server that warmed up a slice of the shapes. It stays.
* unproven key -> `UnprovenRow`: the files of a cold run, so that a build which was stopped in its proof can go on from
  there. It is removed when the proof has succeeded or failed.

Launch and receipt are objects, like the files. Rows name objects by digest, so that garbage collection keeps them. A row
must hold no other digest (for example of a launch's component), because everything that reads like a digest is taken for an
object.

A key contains the launch's key and the conditions under which the files were made. The launch's id is the same everywhere,
but a capture's files contain the root, the interpreter's prefix and the rest of `Launch.conditions`, so a build elsewhere
makes another capture. The path of a model's directory is no condition: the server sees an alias, so no file contains the
path.

A shard is a server that warms up a slice of the shapes: it gets the files of its slice, and no requests. A shard that died
is run again alone, one with a record is not run again, and containers that share a store run shards at the same time
(``--shard I/N``, then ``--merge``). The capture's cold run begins with the files of all shards. It warms up all shapes, gets
all requests, and compiles what no shard compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, Union, cast

from pydantic import Field

from aotgaudi.backends.base import version_of
from aotgaudi.bundle.capture_receipt import CapturedFile, CaptureReceipt, LeftOut
from aotgaudi.bundle.launch import Launch, load_launch
from aotgaudi.digest import Digest, Key, canonical_json, sha256_bytes
from aotgaudi.document import DigestField, Value, load_document
from aotgaudi.errors import ManifestError, SpecError
from aotgaudi.source_digest import sha256_source
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.store import Store
from aotgaudi.wrap.witness import SITE

if TYPE_CHECKING:  # Commands that only look records up need not import it.
    from aotgaudi.wrap.launch import ServerCommand

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MAX_SHARDS = 1024
"""Limits the damage of a typing error."""


class CaptureRow(Value):
    """A capture: its documents and objects, and what was measured while it was built.

    Attributes:
        label: For people.
        launch, receipt: The documents.
        objects: The files' objects, each once.
        cold_seconds: From the start until the server served, from empty caches.
        warm_seconds: The same in the proof.
        build_seconds: For the whole build.
        cold_counts: What the cold run did: compilers run, code generated, files written.
        places: Name of a path -> how many files contain it.
    """

    kind: Literal["capture"] = "capture"
    label: str
    launch: DigestField
    receipt: DigestField
    objects: tuple[DigestField, ...]
    cold_seconds: Seconds
    warm_seconds: Seconds
    build_seconds: Seconds
    cold_counts: dict[str, int]
    places: dict[str, int] = Field(default_factory=dict)

    def digests(self) -> Iterator[Digest]:
        """Yields every object that the row names."""
        yield from (self.launch, self.receipt, *self.objects)

    @classmethod
    def parse(cls, value: object) -> CaptureRow:
        """Returns the row in the value of a record. Raises ValueError."""
        return cls.model_validate_json(canonical_json(value))


class UnprovenRow(Value):
    """The result of a cold run: its files, its answers, and what was measured.

    `saved` holds the server's own counters of artifacts that it saved.
    """

    kind: Literal["draft"] = "draft"
    label: str
    files: tuple[CapturedFile, ...]
    left_out: tuple[LeftOut, ...]
    answers: tuple[str, ...]
    saved: dict[str, int] = Field(default_factory=dict)
    cold_seconds: Seconds
    cold_counts: dict[str, int]
    places: dict[str, int] = Field(default_factory=dict)

    def digests(self) -> Iterator[Digest]:
        """Yields every object that the row names."""
        yield from (file.digest for file in self.files)

    @property
    def artifacts(self) -> dict[str, int]:
        """The number of whole artifacts of each kind that were saved (``num_aot_artifacts_saved``).

        Torch's counts of its own caches (``autograd_cache_saved``) are left out, because loading a whole artifact skips
        them.
        """
        ending = "_saved"
        return {
            name.removesuffix(ending): number
            for name, number in self.saved.items()
            if name.endswith(f"_artifacts{ending}")
        }


RowT = TypeVar("RowT", bound=Union[CaptureRow, UnprovenRow])


def find_capture(store: Store, key: str) -> CaptureRow | None:
    """Returns the record of a capture; None without a record, or if one of its objects is missing."""
    return _find(CaptureRow, store, key)


def find_unproven(store: Store, key: str) -> UnprovenRow | None:
    """Returns the record of a cold run; None without a record, or if one of its objects is missing."""
    return _find(UnprovenRow, store, key)


def record_capture(store: Store, key: str, row: CaptureRow) -> CaptureRow:
    """Records a capture unless there is a complete record already. Returns the record that stays."""
    value = row.model_dump(mode="json")
    stays = store.actions.put(key, value, lambda old: _intact(CaptureRow, old, store.objects) is not None)
    return _intact(CaptureRow, stays, store.objects) or row


def record_unproven(store: Store, key: str, row: UnprovenRow) -> None:
    """Records a cold run. Raises StoreError."""
    store.actions.put(key, row.model_dump(mode="json"))


def read_documents(store: Store, row: CaptureRow) -> tuple[Launch, CaptureReceipt]:
    """Returns the launch and the receipt of a capture. Raises StoreError, CorruptError, ManifestError."""
    receipt = load_document(store.objects.read(row.receipt), CaptureReceipt, "receipt")
    launch = load_launch(store.objects.read(row.launch))
    if launch.id != receipt.manifest_id:
        raise ManifestError(
            f"the receipt {row.receipt} answers launch {receipt.manifest_id}, not {launch.id}"
        )
    return launch, receipt


def _find(kind: type[RowT], store: Store, key: str) -> RowT | None:
    value = store.actions.get(key)
    return None if value is None else _intact(kind, value, store.objects)


def _intact(kind: type[RowT], value: object, objects: ObjectStore) -> RowT | None:
    try:
        row = cast("RowT", kind.model_validate_json(canonical_json(value)))
    except ValueError:  # It is of another kind or version.
        return None
    return row if all(map(objects.has, row.digests())) else None


def capture_key(launch: Launch) -> Key:
    """Returns the key of a proved capture."""
    return Key.of([("record", "aotgaudi.capture/2"), *launch.components(), *_conditions(launch)])


def unproven_key(launch: Launch, weights: str) -> Key:
    """Returns the key of a cold run whose proof has not ended.

    The key holds for this version of the agent and for these `weights` (`launch.weights_stamp`), because the proof compares
    answers.
    """
    builder = [(f"builder.{name}", value) for name, value in sorted(builder_versions().items())]
    head = ("record", "aotgaudi.draft/2"), ("weights", weights)
    return Key.of([*head, *launch.components(), *_conditions(launch), *builder])


def shard_key(launch: Launch, files: Mapping[str, str]) -> Key:
    """Returns the key for a server that gets `files` instead of the files of all shapes, and no requests."""
    components = [(name, value) for name, value in launch.components() if name != "exercise"]
    given = [(f"given.{path}", sha256_bytes(text.encode())) for path, text in sorted(files.items())]
    return Key.of([("record", "aotgaudi.shard/1"), *components, *_conditions(launch), *given])


def builder_versions() -> dict[str, str]:
    """Returns what receipts say about the builder: our version, and the digest of the agent's sources."""
    return {"aotgaudi": version_of("aotgaudi"), "witness": sha256_source(SITE.rglob("*.py"))}


def _conditions(launch: Launch) -> list[tuple[str, str]]:
    conditions = launch.conditions()
    return [
        (f"condition.{name}", value)
        for name, value in conditions
        if not (name == "model.name" and launch.is_aliased)
    ]


@dataclass(frozen=True)
class Shard:
    """One of `num` shards, counted from 1: the files that its server gets, and the key of its record."""

    number: int
    num: int
    files: Mapping[str, str]
    key: str

    @property
    def name(self) -> str:
        """``2/3``."""
        return f"{self.number}/{self.num}"


@dataclass(frozen=True)
class Sharding:
    """How a cold run is shared.

    Attributes:
        num: How many shards there are.
        runs: Whether shards without a record in the store are run.
    """

    num: int
    runs: bool


def parse_shard(text: str) -> tuple[int, int]:
    """Returns I and N of ``I/N``. Raises SpecError."""
    number, _, num = text.partition("/")
    if number.isdecimal() and num.isdecimal() and 1 <= int(number) <= int(num) <= MAX_SHARDS:
        return int(number), int(num)
    raise SpecError("--shard", f"is {text!r}", f"I/N, such as 1/4, with N up to {MAX_SHARDS}")


def shards_of(found: ServerCommand, launch: Launch, files: Mapping[str, str], num: int) -> tuple[Shard, ...]:
    """Returns the shards of a launch with `files` for its shapes. Raises SpecError if they cannot be cut into `num`."""
    slices = found.adapter.slices(files, num)
    return tuple(
        Shard(number, num, given, shard_key(launch, given).hex) for number, given in enumerate(slices, 1)
    )


def union(rows: Iterable[UnprovenRow], given: Iterable[str]) -> tuple[CapturedFile, ...]:
    """Returns by path the files of all rows, except those at the paths `given`.

    Several shards may have made the same graph with different bytes (K-13). So files that belong together by name, such as a
    recipe and its metadata, come from one row: the first that has any of them.
    """
    left_out, owners = frozenset(given), dict[str, int]()
    files: dict[str, CapturedFile] = {}
    for number, row in enumerate(rows):
        for file in row.files:
            stem = str(PurePosixPath(file.path).with_suffix(""))
            if file.path not in left_out and owners.setdefault(stem, number) == number:
                files[file.path] = file
    return tuple(files[path] for path in sorted(files))
