"""Check and probes with our own backend: a unit that another process runs from recipes, and whether a spec fits.

``--fit`` goes by the rule that a server applies when it starts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aotgaudi.backends.hpu.process import on_card
from aotgaudi.doctor.hpu.bridge import MAX_ERROR, Bridge, difference
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, check, judged
from aotgaudi.errors import SpecError, UnexaminedError
from aotgaudi.gaudi.environment import WITHOUT_BRIDGE, recipe_directory
from aotgaudi.machine import Memory
from aotgaudi.manifest.manifest import Manifest, read_manifest, write_manifest
from aotgaudi.manifest.memory import KvCache, MemoryNeed

CHECKS: list[HpuCheck] = []


def _unit_text() -> str:
    """Returns a piece of a step: a product, a write to a cache and a read of it."""
    lines: tuple[object, ...] = (
        "aotgaudi.graph/2",
        ["input", "float32", [4, 8], [8, 1]],
        ["input", "float32", [8, 8], [8, 1]],
        ["input", "float32", [12, 8], [8, 1]],
        ["input", "int64", [4], [1]],
        ["call", "aten.mm.default", [{"%": 0}, {"%": 1}], {}],
        ["call", "aten.index_copy_.default", [{"%": 2}, 0, {"%": 3}, {"%": 4}], {}],
        ["call", "aten.index_select.default", [{"%": 5}, 0, {"%": 3}], {}],
        ["call", "aten.relu.default", [{"%": 6}], {}],
        ["output", [{"%": 7}]],
    )
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


# If another line was refuted, that is the cause. `--only H-26` runs this check all the same.
@check(CHECKS, "H-26", "a unit, then another process", "K-46", needs=None)
def _whole(lab: Lab) -> Iterator[LineFinding]:
    artifact = str(lab.new_directory("artifact"))
    built = lab.run("whole.build", artifact=artifact)
    served = lab.run("whole.serve", artifact=artifact, **built.values) if built.is_whole else built
    if served.is_whole:
        compiled, error = served.values["compiled"], served.values["error"]
        seen = f"{compiled} graphs compiled while serving, {error:.1e} off"
        yield judged("K-46", compiled == 0 and error <= MAX_ERROR, seen)
    else:
        yield judged("K-46", False, served.problem)


def build(_: Bridge, artifact: str) -> Mapping[str, Any]:
    """Compiles the unit, and copies its files to `artifact`. Returns which card it is for."""
    from aotgaudi.backends.base import Unit
    from aotgaudi.backends.hpu.card import acquired
    from aotgaudi.backends.hpu.compiler import HpuCompiler
    from aotgaudi.digest import Key

    card = acquired()
    unit = Unit(_unit_text(), Key.of([("doctor", "unit")]), "unit")
    work_dir = Path(artifact, "work")
    work_dir.mkdir()
    for name, path in (
        HpuCompiler(_target(card.device_type, card.synapse)).compile(unit, work_dir).files.items()
    ):
        shutil.copyfile(path, Path(artifact, name))
    return {"machine": card.device_type, "synapse": card.synapse}


def serve(bridge: Bridge, artifact: str, machine: str, synapse: str) -> Mapping[str, Any]:
    """Restores the unit, rehearses and runs it. Returns what was compiled, and the error against the CPU."""
    torch = bridge.torch

    from aotgaudi.backends.hpu.runtime import HpuRuntime
    from aotgaudi.digest import Digest
    from aotgaudi.graphs.canonical import from_text

    files = {path.name: path for path in Path(artifact).iterdir() if path.is_file()}
    directory = recipe_directory()
    if directory.is_dir():
        directory.rmdir()  # The runtime makes it.
    runtime = HpuRuntime(_target(machine, synapse))
    runtime.restore((name, Digest.of(path.read_bytes()), path) for name, path in files.items())
    inputs = [*bridge.random(((4, 8), (8, 8), (12, 8))), torch.tensor([3, 0, 7, 5])]
    unit, placed = runtime.load(files), [runtime.placement.put(tensor) for tensor in inputs]
    runtime.rehearse({"unit": lambda: unit.run(placed)})
    (found,) = unit.run(placed)
    graph, _ = from_text(_unit_text())
    (wanted,) = graph(*inputs)
    directory.chmod(0o700)  # Otherwise it could not be removed.
    return {"compiled": runtime.num_compiled(), "error": difference(found, wanted)}


def _target(machine: str, synapse: str) -> Any:
    from aotgaudi.backends.base import Target

    return Target(backend="hpu", machine=machine, toolchain={"synapse": synapse})


# Whether a spec fits


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
    sizes = lab.run("whole.traced", environment=WITHOUT_BRIDGE, manifest=str(path))
    if not sizes.is_whole:
        raise SpecError("--fit", f"a step of it cannot be traced: {sizes.problem}", "another model or spec")
    found = lab.run("whole.memory")
    if not found.is_whole:
        raise UnexaminedError(f"a card could not be acquired: {found.problem}")
    card, block_bytes = Memory(**found.values), sizes.values["block_bytes"]
    need = MemoryNeed(
        cache=KvCache(block_bytes, fixed_bytes=block_bytes),
        num_blocks=manifest.spec.limits.num_blocks,
        weights_bytes=sizes.values["weights_bytes"],
    )
    return on_card(need, card), card


def traced(_: Bridge, manifest: str) -> Mapping[str, Any]:
    """Traces a step, which uses all weights and caches. Returns their sizes."""
    from aotgaudi.graphs.dialect import dialect_of
    from aotgaudi.graphs.trace import trace
    from aotgaudi.runtime.load import need_of

    whole = read_manifest(Path(manifest))
    spec = whole.spec
    step = trace(whole.of_kind("prompt")[0], spec.model, spec.limits, dialect_of(spec))
    need = need_of((step,), spec.limits.num_blocks)
    return {"weights_bytes": need.weights_bytes, "block_bytes": need.cache.block_bytes}


def memory(_: Bridge) -> Mapping[str, Any]:
    """Acquires the card. Returns its memory."""
    from aotgaudi.backends.hpu.card import acquired

    return asdict(acquired().memory())
