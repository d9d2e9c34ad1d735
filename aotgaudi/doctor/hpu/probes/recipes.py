"""Probes of recipes: by which keys graphs are known, what is counted, and what lies in the directory afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aotgaudi.doctor.hpu.probes.bridge import Bridge, Run, difference, one_line, recipe_directory, told
from aotgaudi.gaudi.recipes import scan

SHAPES = ((4, 8), (8, 8))
"""Of the inputs of each graph."""

_PIN_STEP = 1_000_000
_WARM_UP = 9


def graph(number: int) -> Run:
    """Returns graph `number`, each another one. Graph 0 is a single operator."""
    if not number:
        return lambda x, _: x * 0.5

    def run(x: Any, w: Any) -> Any:
        y = x @ w
        for _ in range(number):
            y = (y * 0.5).relu() + 1.0
        return y.sum(-1, keepdim=True) * y

    return run


def keys(order: Sequence[int], pin: bool = False, fill_from: str = "") -> Mapping[str, Any]:
    """Runs graphs one after the other; says which keys each looked up, and how far results are from the CPU's.

    Args:
        order: Numbers of graphs.
        pin: Whether FX's counter of modules begins at a number of the graph's own (K-09).
        fill_from: A directory whose recipes are copied into this process's once the bridge is imported.
    """
    bridge = Bridge()
    if fill_from:
        copy_recipes(Path(fill_from), recipe_directory())
    if pin:
        _run(bridge, _WARM_UP, pin)  # What the front end counts once a process, it has counted then.
    runs = [_run(bridge, number, pin) for number in order]
    has_flush = bridge.flush()
    return {"runs": runs, "has_flush": has_flush, "total": told(bridge.counts()), **_directory()}


def _run(bridge: Bridge, number: int, pin: bool) -> Mapping[str, Any]:
    bridge.forget()
    inputs, before = bridge.random(SHAPES), bridge.counts()
    if pin:
        bridge.torch.fx.graph_module._loader.next_id = _PIN_STEP * (number + 1)
    error, problem = 0.0, ""
    try:
        error = difference(bridge.compiled(graph(number))(*bridge.placed(*inputs)), graph(number)(*inputs))
    except (
        Exception
    ) as raised:  # A recipe of another graph, say: which keys were looked up is told all the same.
        problem = one_line(raised)
    found = sorted(bridge.counts().since(before).recipes)
    return {"graph": number, "keys": found, "error": error, "problem": problem}


def copy_recipes(source: Path, target: Path) -> None:
    """Copies the complete pairs of one directory into another."""
    for pair in scan(source).pairs:
        for name, path in pair.files():
            shutil.copyfile(path, target / name)


def _directory() -> Mapping[str, Any]:
    found = scan(recipe_directory())
    return {
        "files": sorted(pair.key for pair in found.pairs),
        "uncached": list(found.uncached),
        "constants": list(found.constants),
        "others": list(found.others),
        "libraries": sorted({pair.libraries for pair in found.pairs}),
        "synapse": sorted({pair.synapse for pair in found.pairs}),
    }


def metrics() -> Mapping[str, Any]:
    """Runs a graph twice; says what was counted each time, and whether it is told at once."""
    bridge = Bridge()
    told_at_once: list[str] = []
    metric = bridge.module("hpu.metrics").metric_global("graph_compilation")
    metric.on_metric_change(lambda changed: told_at_once.append(changed.name()))
    run, inputs = bridge.compiled(graph(3)), bridge.placed(*bridge.random(SHAPES))
    counts = [bridge.counts()]
    for _ in range(2):
        run(*inputs)
        counts.append(bridge.counts())
    return {
        "first": told(counts[1].since(counts[0])),
        "second": told(counts[2].since(counts[1])),
        "knows_recipes": bridge.counters.knows_recipes,
        "told_at_once": bool(told_at_once),
    }


def layers() -> Mapping[str, Any]:
    """Runs two equal layers in a row; says which keys each looked up."""
    bridge = Bridge()
    run = bridge.compiled(graph(4))
    x, w = bridge.placed(*bridge.random(SHAPES))
    found = []
    for _ in range(2):
        before = bridge.counts()
        x = run(x, w)
        found.append(sorted(bridge.counts().since(before).recipes))
    return {"first": found[0], "second": found[1]}
