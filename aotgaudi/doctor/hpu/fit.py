"""``doctor --hpu --fit``: whether a spec fits on the card, by the rule that a server applies when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotgaudi.backends.hpu.room import on_card
from aotgaudi.doctor.hpu.bridge import Bridge
from aotgaudi.doctor.hpu.lab import Lab
from aotgaudi.errors import SpecError, UnexaminedError
from aotgaudi.gaudi.environment import WITHOUT_BRIDGE
from aotgaudi.machine import Memory
from aotgaudi.manifest.manifest import Manifest, read_manifest, write_manifest
from aotgaudi.manifest.memory import KvCache, MemoryNeed


def fitting(lab: Lab, manifest: Manifest) -> tuple[MemoryNeed, Memory]:
    """Returns what a server of `manifest` needs of the card, and the card's memory. Traces one step, and compiles nothing.

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
    card, block_bytes = Memory(**memory.values), traced.values["block_bytes"]
    need = MemoryNeed(
        cache=KvCache(block_bytes, fixed_bytes=block_bytes),
        num_blocks=manifest.spec.limits.num_blocks,
        weights_bytes=traced.values["weights_bytes"],
    )
    return on_card(need, card), card


def room(_: Bridge, manifest: str) -> Mapping[str, Any]:
    """Traces a step, which uses all weights and caches. Returns their sizes."""
    from aotgaudi.graphs.dialect import dialect_of
    from aotgaudi.graphs.trace import trace
    from aotgaudi.runtime.load import need_of

    whole = read_manifest(Path(manifest))
    spec = whole.spec
    traced = trace(whole.of_kind("prompt")[0], spec.model, spec.limits, dialect_of(spec))
    need = need_of((traced,), spec.limits.num_blocks)
    return {"weights_bytes": need.weights_bytes, "block_bytes": need.cache.block_bytes}


def memory(_: Bridge) -> Mapping[str, Any]:
    """Acquires the card. Returns its memory."""
    from aotgaudi.backends.hpu.card import acquired

    free, total = acquired().memory()
    return {"free_bytes": free, "total_bytes": total}
