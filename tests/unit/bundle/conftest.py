"""Two small sealed bundles: three entries over two programs, which share a unit; and the captured caches of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.capture_receipt import CapturedFile, CaptureReceipt, Expected, LeftOut, Proof
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, UnitRecord
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.verify import Report, verify_bundle
from aotgaudi.digest import Digest
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.manifest import dumps as dump_manifest
from aotgaudi.store.cas import ObjectStore, object_path
from tests.launches import a_launch
from tests.specs import spec_of

ENTRIES: tuple[Entry, ...] = (PromptEntry(1, 128, 0), DecodeEntry(4, 1, 16), DefragEntry(8))
SHARED, LAYER = "a" * 64, "b" * 64
SPEC = spec_of()
MANIFEST = dump_manifest(Manifest(SPEC, ENTRIES))
MANIFEST_ID = Manifest(SPEC, ENTRIES).id


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
        return verify_bundle(self.open())

    def object(self, name: str) -> Path:
        """Where a named object lies in the bundle, made writable so that a test can damage it."""
        path = object_path(self.path, self.digests[name])
        path.chmod(0o644)
        return path


def program(units: tuple[str, ...], constants: Digest | None = None, outputs: tuple[str, ...] = ()) -> bytes:
    calls = tuple(Call(unit=unit, inputs=(), outputs=outputs if unit == LAYER else ()) for unit in units)
    program = Program(
        inputs=(),
        weights=(),
        caches=(),
        calls=calls,
        outputs=outputs,
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
    digests["model"] = objects.put_bytes(program((SHARED, LAYER), digests["constants"], ("1.0",)))
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


LAUNCH = a_launch(guest="fake").dumps()
LAUNCH_ID = a_launch(guest="fake").id
CAPTURED = {
    "cache/a/model": b"a pickle" * 40,
    "cache/a/run.py": b"print(1)\n",
    "cache/b/k.so": b"\x7fELF" + bytes(9000),
    "cache/b/l.so": b"\x7fELF" + bytes(9000),  # The same bytes: one object.
    "home/.config/x.json": b"{}",
}


@dataclass(frozen=True)
class SealedCapture:
    """A bundle of captured caches at `path`, and everything that went into it."""

    path: Path
    objects: ObjectStore
    receipt: CaptureReceipt

    def pack(self, path: Path | None = None, signing: Signing | None = None) -> None:
        """Seals again, here or elsewhere."""
        pack_bundle(LAUNCH, LAUNCH_ID, self.receipt, self.objects, path or self.path, signing)

    def open(self) -> Bundle:
        return open_bundle(self.path)

    def object(self, name: str) -> Path:
        """Where a captured file's bytes lie in the bundle, made writable so that a test can damage them."""
        path = object_path(self.path, Digest.of(CAPTURED[name]))
        path.chmod(0o644)
        return path


def capture_receipt(objects: ObjectStore, files: Mapping[str, bytes], **changes: Any) -> CaptureReceipt:
    rows = (
        CapturedFile(
            path=path, digest=objects.put_bytes(data), mode="0555" if path.endswith("l.so") else "0444"
        )
        for path, data in sorted(files.items())
    )
    values: dict[str, Any] = {
        "manifest_id": LAUNCH_ID,
        "target": Target(backend="fake", machine="none", isa=("avx2",)),
        "builder": {"aotgaudi": "1"},
        "files": tuple(rows),
        "left_out": (LeftOut(pattern="**/*.lock", reason="held while a file is written"),),
        "expected": Expected(loads={"aot:model": 1}, roles={"Worker": 1}, hooks=("audit",)),
        "factors": {"env": {"VLLM_X": "d" * 64}},
        "proof": Proof(counts={"compile": 0, "generate": 0}, witnesses=("files", "process")),
        "residuals": ("CUDA graphs",),
        "repairs": ("vllm.finalize-loading",),
    }
    return CaptureReceipt(**{**values, **changes})


@pytest.fixture
def captured(tmp_path: Path) -> SealedCapture:
    objects = ObjectStore(tmp_path / "capture-store")
    sealed = SealedCapture(tmp_path / "capture", objects, capture_receipt(objects, CAPTURED))
    sealed.pack()
    return sealed
