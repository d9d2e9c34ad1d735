"""Bundles that are sealed with nothing compiled."""

from __future__ import annotations

import platform
from pathlib import Path

from aotgaudi.backends.base import Target, version_of
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.entries import DefragEntry, Entry, SamplerEntry
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest.manifest import Manifest, dumps
from aotgaudi.store.cas import ObjectStore

UNIT = "a" * 64


def target_of(**changes: object) -> Target:
    """A target that this machine satisfies, but for `changes`."""
    machine = {"backend": "cpu", "machine": platform.machine(), "toolchain": {"torch": version_of("torch")}}
    return Target.model_validate({**machine, **changes})


def seal(
    manifest: Manifest, root: Path, *, num_cold: int = 0, manifest_id: str = "", target: Target | None = None
) -> Path:
    """Seals a bundle in which one unit answers every entry but the first `num_cold`."""
    objects = ObjectStore(root / "store")
    target = target or target_of()
    call = Call(unit=UNIT, inputs=(), outputs=("0.0", "0.1", "0.2", "0.3"))

    def program_of(entry: Entry) -> str:
        num_outputs = 1
        if isinstance(entry, SamplerEntry) and entry.signature.logprobs:
            num_outputs = 4
        if isinstance(entry, DefragEntry):
            num_outputs = 0
        outputs = call.outputs[:num_outputs]
        program = Program(inputs=(), weights=(), caches=(), calls=(call,), outputs=outputs)
        return str(objects.put_bytes(program.dumps()))

    code = str(objects.put_bytes(b"code"))
    receipt = Receipt(
        manifest_id=manifest_id or manifest.id,
        target=target,
        programs={entry.id: program_of(entry) for entry in manifest.entries[num_cold:]},
        units={UNIT: SealedUnit(artifact={"unit.so": code, "graph.txt": code}, tolerance=0.0)},
        builder={},
    )
    pack_bundle(dumps(manifest), receipt.manifest_id, receipt, objects, root / "bundle")
    return root / "bundle"


def damage(bundle: Path) -> None:
    """Changes a byte of a bundle's code."""
    (path,) = (p for p in (bundle / "objects").rglob("*") if p.is_file() and p.read_bytes() == b"code")
    path.chmod(0o644)
    path.write_bytes(b"c0de")
