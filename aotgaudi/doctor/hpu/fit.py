"""``doctor --hpu --fit``: whether a spec fits on the card, by the rule that a server applies when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotgaudi.backends.base import Room
from aotgaudi.backends.hpu.admission import CardRoom
from aotgaudi.doctor.hpu.bridge import Bridge
from aotgaudi.doctor.hpu.lab import Lab
from aotgaudi.errors import SpecError, UnexaminedError
from aotgaudi.gaudi.environment import WITHOUT_BRIDGE
from aotgaudi.manifest.manifest import Manifest, read_manifest, write_manifest


def fitting(lab: Lab, manifest: Manifest) -> CardRoom:
    """Returns the card's memory, and what a server of `manifest` would need of it. Traces one step, and compiles nothing.

    Raises:
        SpecError: the manifest is of another backend, or its model cannot be traced.
        UnexaminedError: no card could be examined.
    """
    backend = manifest.spec.target.backend
    if backend != "hpu":
        raise SpecError("target.backend", f"is {backend!r}", '--fit is about a card: "hpu"')
    path = lab.new_directory("fit") / "manifest.json"
    write_manifest(path, manifest)
    traced = lab.run("fit.room", environment=WITHOUT_BRIDGE, manifest=str(path))
    if not traced.is_whole:
        raise SpecError("--fit", f"a step of it cannot be traced: {traced.problem}", "another model or spec")
    memory = lab.run("fit.memory")
    if not memory.is_whole:
        raise UnexaminedError(f"a card could not be acquired: {memory.problem}")
    return CardRoom(**memory.values, room=Room(**traced.values))


def room(_: Bridge, manifest: str) -> Mapping[str, Any]:
    """Traces a step, which uses all weights and caches. Returns their sizes."""
    from dataclasses import asdict

    from aotgaudi.graphs.dialect import dialect_of
    from aotgaudi.graphs.trace import trace
    from aotgaudi.runtime.load import room_of

    whole = read_manifest(Path(manifest))
    spec = whole.spec
    traced = trace(whole.of_kind("prompt")[0], spec.model, spec.limits, dialect_of(spec))
    return asdict(room_of((traced,), spec.limits.num_blocks))


def memory(_: Bridge) -> Mapping[str, Any]:
    """Acquires the card. Returns its memory."""
    from aotgaudi.backends.hpu.card import acquired

    free, total = acquired().memory()
    return {"free_bytes": free, "total_bytes": total}
