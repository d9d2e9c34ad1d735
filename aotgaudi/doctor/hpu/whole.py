"""Check and probes of the whole: the backend compiles a unit in one process, and another process runs it from recipes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aotgaudi.doctor.hpu.contract import LINES
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, judged
from aotgaudi.doctor.hpu.recipes import MAX_ERROR, built_recipes

_LINE = "K-46"


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


def _whole(lab: Lab) -> Iterator[LineFinding]:
    artifact = lab.new_directory("artifact")
    key_mode = "pinned" if built_recipes(lab).is_pinned else "stable"
    built = lab.run("whole.build", artifact=str(artifact), key_mode=key_mode)
    if not built.is_whole:
        yield judged(_LINE, False, built.problem)
        return
    served = lab.run("whole.serve", artifact=str(artifact), key_mode=key_mode, **built.values)
    if not served.is_whole:
        yield judged(_LINE, False, served.problem)
        return
    compiled, error = served.values["compiled"], served.values["error"]
    seen = f"{compiled} graphs compiled while serving, {error:.1e} off"
    yield judged(_LINE, compiled == 0 and error <= MAX_ERROR, seen)


WHOLE_CHECKS = (
    # If another line was refuted, that is the cause. `--only H-26` runs this check all the same.
    HpuCheck(
        "H-26",
        "a unit, then another process",
        (_LINE,),
        _whole,
        tuple(line for line in LINES if line != _LINE),
    ),
)


# Probes


def probe_build(artifact: str, key_mode: str) -> Mapping[str, Any]:
    """Compiles the unit, and copies its files to `artifact`. Returns which card it is for."""
    from aotgaudi.backends.base import Unit
    from aotgaudi.backends.hpu.card import acquired
    from aotgaudi.backends.hpu.compiler import HpuCompiler
    from aotgaudi.digest import Key

    card = acquired()
    target = _target(card.device_type, card.synapse, key_mode)
    unit = Unit(_unit_text(), Key.of([("doctor", "unit")]), "unit")
    work_dir = Path(artifact, "work")
    work_dir.mkdir()
    for name, path in HpuCompiler(target).compile(unit, work_dir).files.items():
        shutil.copyfile(path, Path(artifact, name))
    return {"machine": card.device_type, "synapse": card.synapse}


def probe_serve(artifact: str, key_mode: str, machine: str, synapse: str) -> Mapping[str, Any]:
    """Restores the unit, rehearses and runs it. Returns what was compiled, and the error against the CPU."""
    import torch

    from aotgaudi.backends.hpu.card import recipe_directory
    from aotgaudi.backends.hpu.runtime import HpuRuntime
    from aotgaudi.digest import Digest
    from aotgaudi.doctor.hpu.bridge import difference
    from aotgaudi.graphs.canonical import from_text

    files = {path.name: path for path in Path(artifact).iterdir() if path.is_file()}
    directory = recipe_directory()
    if directory.is_dir():
        directory.rmdir()  # The runtime makes it.
    runtime = HpuRuntime(_target(machine, synapse, key_mode))
    runtime.restore((name, Digest.of(path.read_bytes()), path) for name, path in files.items())
    generator = torch.Generator().manual_seed(1)
    inputs = [
        *(torch.randn(*shape, generator=generator) for shape in ((4, 8), (8, 8), (12, 8))),
        torch.tensor([3, 0, 7, 5]),
    ]
    unit, placed = runtime.load(files), [runtime.placement.put(tensor) for tensor in inputs]
    runtime.rehearse({"unit": lambda: unit.run(placed)})
    (found,) = unit.run(placed)
    graph, _ = from_text(_unit_text())
    (wanted,) = graph(*inputs)
    directory.chmod(0o700)  # Otherwise it could not be removed.
    return {"compiled": runtime.num_compiled(), "error": difference(found, wanted)}


def _target(machine: str, synapse: str, key_mode: str) -> Any:
    from aotgaudi.backends.base import Target
    from aotgaudi.backends.hpu.probe import KEY_MODE

    return Target(backend="hpu", machine=machine, toolchain={"synapse": synapse}, flags={KEY_MODE: key_mode})
