"""A small sealed bundle: three entries over two programs, which share a unit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, UnitRecord
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.verify import Report, verify_bundle
from aotgaudi.digest import Digest
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry
from aotgaudi.graphs.program import Call, Program
from aotgaudi.store.cas import ObjectStore, object_path

ENTRIES: tuple[Entry, ...] = (PromptEntry(1, 128, 0), DecodeEntry(4, 1, 16), DefragEntry(8))
SHARED, LAYER = "a" * 64, "b" * 64
MANIFEST = b'{"any": "bytes"}\n'
MANIFEST_ID = "f" * 64


@dataclass(frozen=True)
class Sealed:
    """Everything that went into a bundle at `path`, and the digests of its objects by a short name.

    The prompt and decode entries run the program ``model`` (units `shared` and `layer`, and constants), the
    defragmentation runs ``swap`` (unit `shared`).
    """

    path: Path
    objects: ObjectStore
    receipt: Receipt
    digests: dict[str, Digest]
    entries: tuple[Entry, ...] = ENTRIES
    manifest_bytes: bytes = MANIFEST
    manifest_id: str = MANIFEST_ID
    shared: str = SHARED
    layer: str = LAYER

    @property
    def labels(self) -> dict[str, str]:
        """Label by id of the three entries: prompt, decode, defrag."""
        return {entry.id: str(entry) for entry in self.entries}

    def pack(
        self, path: Path | None = None, receipt: Receipt | None = None, signing: Signing | None = None
    ) -> None:
        """Seals again, here or elsewhere."""
        receipt = receipt or self.receipt
        pack_bundle(MANIFEST, MANIFEST_ID, receipt, self.objects, path or self.path, signing)

    def open(self) -> Bundle:
        return open_bundle(self.path)

    def report(self) -> Report:
        return verify_bundle(self.open(), self.labels)

    def object(self, name: str) -> Path:
        """Where a named object lies in the bundle, made writable so that a test can damage it."""
        path = object_path(self.path, self.digests[name])
        path.chmod(0o644)
        return path


def program(units: tuple[str, ...], constants: Digest | None = None) -> bytes:
    calls = tuple(Call(unit=unit, inputs=(), outputs=()) for unit in units)
    program = Program(
        inputs=(),
        weights=(),
        caches=(),
        calls=calls,
        outputs=(),
        constants=None if constants is None else str(constants),
    )
    return program.dumps()


def record(**files: Digest) -> UnitRecord:
    return UnitRecord(
        artifact={name.replace("_", "."): str(digest) for name, digest in files.items()},
        label="any",
        compile_seconds=1.25,
        max_abs_error=1e-7,
        tolerance=1e-5,
    )


@pytest.fixture
def sealed(tmp_path: Path) -> Sealed:
    objects = ObjectStore(tmp_path / "store")
    digests = {name: objects.put_bytes(name.encode() * 9) for name in ("shared.so", "layer.so", "constants")}
    digests["model"] = objects.put_bytes(program((SHARED, LAYER), digests["constants"]))
    digests["swap"] = objects.put_bytes(program((SHARED,)))
    receipt = Receipt(
        manifest_id=MANIFEST_ID,
        target=Target(backend="fake", machine="none", isa=("avx2",), toolchain={"torch": "2.13"}),
        programs={
            ENTRIES[0].id: str(digests["model"]),
            ENTRIES[1].id: str(digests["model"]),
            ENTRIES[2].id: str(digests["swap"]),
        },
        units={SHARED: record(unit_so=digests["shared.so"]), LAYER: record(unit_so=digests["layer.so"])},
        builder={"aotgaudi": "1"},
    )
    sealed = Sealed(tmp_path / "bundle", objects, receipt, digests)
    sealed.pack()
    return sealed
