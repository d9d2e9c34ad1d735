"""Probes of the device and of the process that has it: the environment, the mode, types, memory, who holds the card."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotgaudi.doctor.hpu.probes.bridge import Bridge, difference, refusal, told
from aotgaudi.doctor.hpu.probes.recipes import SHAPES, graph
from aotgaudi.gaudi.cache_setting import VARIABLE as CACHE_VARIABLE
from aotgaudi.gaudi.cache_setting import sealed_setting

_MIB = 1 << 20


def identity() -> Mapping[str, Any]:
    """Acquires the card and says what it is."""
    bridge = Bridge()
    hpu = bridge.torch.hpu
    (placed,) = bridge.placed(bridge.torch.ones(1))
    return {
        "name": hpu.get_device_name(),
        "capability": hpu.get_device_capability(),
        "is_double": bool(getattr(importlib.import_module("habana_frameworks"), "DOUBLE", False)),
        "device": placed.device.type,
    }


def late_setting(directory: str) -> Mapping[str, Any]:
    """Sets the cache's directory after torch was imported, and compiles; says how many files came there."""
    bridge = Bridge()
    was_registered = bridge.is_registered()
    os.environ[CACHE_VARIABLE] = sealed_setting(Path(directory))
    bridge.compiled(graph(1))(*bridge.placed(*bridge.random(SHAPES)))
    bridge.flush()
    return {"num_late": len(list(Path(directory).iterdir())), "was_registered": was_registered}


def compile_one() -> Mapping[str, Any]:
    """Compiles a graph, for which the bridge acquires the card and reads its cache's setting."""
    bridge = Bridge()
    inputs = bridge.random(SHAPES)
    found = bridge.compiled(graph(1))(*bridge.placed(*inputs))
    return {"error": difference(found, graph(1)(*inputs))}


def mode() -> Mapping[str, Any]:
    """Says which mode the process is in."""
    bridge = Bridge()
    return {
        "is_lazy": bool(bridge.module("utils.internal").is_lazy()),
        "has_graphs": hasattr(bridge.torch.hpu, "wrap_in_hpu_graph"),
    }


def hpu_graphs() -> Mapping[str, Any]:
    """In the lazy mode: runs a captured module, and runs it for warm-up with other values of the same shape."""
    bridge = Bridge()
    torch = bridge.torch
    module = torch.hpu.wrap_in_hpu_graph(torch.nn.Identity())
    ones, twos = bridge.placed(torch.ones(3), torch.full((3,), 2.0))
    module(ones)
    return {"is_stale": float(module(twos, warmup_mode=True).cpu()[0]) == 1.0}


def eager() -> Mapping[str, Any]:
    """Runs one operator outside a graph, at a size of its own; says what was counted, and why it was refused if it was."""
    bridge = Bridge()
    (x,) = bridge.placed(bridge.torch.ones(3, 17))
    before = bridge.counts()
    refused = refusal(lambda: x + x)
    seen = told(bridge.counts().since(before))
    return {**seen, "refused": refused, "is_told": bridge.counters.knows_eager}


def casts() -> Mapping[str, Any]:
    """Sends what 32 bits cannot hold to the device and back."""
    bridge = Bridge()
    torch = bridge.torch
    large, precise = bridge.placed(
        torch.tensor([2**33 + 5]), torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    )
    return {"integer": int(large.cpu()[0]), "double_excess": float(precise.cpu()[0] - 1.0)}


def memory(mebibytes: int) -> Mapping[str, Any]:
    """Allocates and frees; says by how many bytes the figures fell and rose."""
    bridge = Bridge()
    torch = bridge.torch
    bridge.placed(torch.ones(1))
    free_before = torch.hpu.mem_get_info()[0]
    block = bridge.placed(torch.zeros(mebibytes * _MIB // 4))
    free_with = torch.hpu.mem_get_info()[0]
    del block
    return {
        "asked": mebibytes * _MIB,
        "taken": free_before - free_with,
        "returned": torch.hpu.mem_get_info()[0] - free_with,
    }


def hold(ready: str, seconds: float) -> Mapping[str, Any]:
    """Acquires the card, says so by making the file `ready`, and keeps it for a while."""
    bridge = Bridge()
    placed = bridge.placed(bridge.torch.ones(1))
    Path(ready).touch()
    time.sleep(seconds)
    return {"num_placed": len(placed)}


def switches() -> Mapping[str, Any]:
    """Raises while a flag is set for a while, and forbids compiling at run time; says what came of it.

    None: this release has no such thing.
    """
    bridge = Bridge()
    config = bridge.module("internal.bridge_config")
    with contextlib.suppress(InterruptedError), config.env_setting("PT_COMPILE_ONLY_MODE", True):
        raise InterruptedError
    getter = getattr(config, "get_pt_compile_only_mode", None)
    stays_set = None if getter is None else bool(getter())
    forbid = getattr(config, "set_pt_hpu_disallow_torch_compile", None)
    if forbid is None:
        return {"stays_set": stays_set, "forbidden": None}
    forbid(True)
    inputs = bridge.placed(*bridge.random(SHAPES))
    return {"stays_set": stays_set, "forbidden": refusal(lambda: bridge.compiled(graph(6))(*inputs))}
