"""First use under trusted keys: of what a builder makes, only what the signed receipt names is ever loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import HostPlacement, Placement, Plan
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.compile.pipeline import build
from aotgaudi.digest import Digest
from aotgaudi.errors import UntrustedError
from aotgaudi.manifest.manifest import Manifest, dumps
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.first_use import FirstUseBuilder
from aotgaudi.runtime.guard import Guard
from aotgaudi.runtime.load import Loader
from aotgaudi.runtime.shards import ShardReader
from aotgaudi.store.store import Store
from tests.workload import seed, tiny_spec

MANIFEST = Manifest.of(tiny_spec())
ENTRY = MANIFEST.entries[0]


@dataclass
class Loaded:
    """A unit that computes nothing."""

    run: Callable[[Sequence[Any]], list[Any]] = lambda _: []


@dataclass
class RecordingRuntime:
    """Notes what it is given to load, as it was when it was loaded."""

    digests: list[Digest] = field(default_factory=list)
    placement: Placement = field(default_factory=HostPlacement)

    def restore(self, files: Iterable[tuple[str, Digest, Path]]) -> None:
        """Units are loaded from their own files here."""

    def rehearse(self, runs: Mapping[str, Callable[[], object]]) -> None:
        """Nothing must have run."""

    def load(self, files: Mapping[str, Path]) -> Loaded:
        self.digests += [Digest.of(path.read_bytes()) for path in files.values()]
        return Loaded()

    def join(self, plan: Plan) -> None:
        """Plans are run call by call here."""

    def num_compiled(self) -> int:
        return 0


@dataclass(frozen=True)
class Place:
    """A store in which everything is built, and the receipt of that build."""

    store: Path
    receipt: Receipt
    runtime: RecordingRuntime = field(default_factory=RecordingRuntime)
    table: ExecutableTable = field(default_factory=ExecutableTable)

    def builder(
        self, signed: Receipt | None, environment: Mapping[str, str] | None = None
    ) -> FirstUseBuilder:
        loader = Loader(self.runtime, ShardReader(ModelDirectory(self.store)), 4)
        return FirstUseBuilder(
            dumps(MANIFEST), self.store, loader, self.table, Guard(), environment=environment, signed=signed
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    store = Store.open(tmp_path / "store")
    seed(store, MANIFEST.spec, MANIFEST.entries, (("layer a", "head b"),))
    build(MANIFEST, tmp_path / "bundle", store=store, jobs=1)
    return Place(tmp_path / "store", open_bundle(tmp_path / "bundle").receipt)


def artifacts(receipt: Receipt) -> set[Digest]:
    return {digest for unit in receipt.units.values() for digest in unit.artifact.values()}


def test_what_the_receipt_names_is_loaded(place: Place) -> None:
    place.builder(place.receipt)(ENTRY)

    assert ENTRY in place.table
    assert set(place.runtime.digests) == artifacts(place.receipt)


def test_what_a_builder_made_otherwise_than_signed_is_never_loaded(place: Place) -> None:
    """The store answers with intact objects and valid records; no trusted key has signed for these bytes."""
    signed_bytes = Digest.of(b"what was signed")
    units = {
        key: unit.model_copy(update={"artifact": dict.fromkeys(unit.artifact, signed_bytes)})
        for key, unit in place.receipt.units.items()
    }

    with pytest.raises(UntrustedError, match=f"is not what was signed: .* has no object {signed_bytes}"):
        place.builder(place.receipt.model_copy(update={"units": units}))(ENTRY)

    assert place.runtime.digests == []
    assert ENTRY not in place.table


def test_an_entry_that_nobody_signed_for_is_not_even_built(place: Place) -> None:
    programs = {key: value for key, value in place.receipt.programs.items() if key != ENTRY.id}
    nowhere = {**os.environ, "PYTHONPATH": os.devnull, "PYTHONHOME": os.devnull}  # No builder could start.

    with pytest.raises(UntrustedError, match="no trusted key has signed for it"):
        place.builder(place.receipt.model_copy(update={"programs": programs}), nowhere)(ENTRY)

    assert place.runtime.digests == []
