"""Checks and probes of the software and the device: versions, environment, modes, types, memory, and access to the card."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from aotgaudi.backends.base import version_of
from aotgaudi.doctor.hpu.bridge import Bridge, difference, graph, probe_command, refusal
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, Outcome, check, judged, probe, skipped
from aotgaudi.gaudi.environment import BUSY, CACHE_VARIABLE, sealed_setting
from aotgaudi.gaudi.identity import PLUGIN

CHECKS: list[HpuCheck] = []

_NUMBERS = ("K-29", "K-37")
_FIRST_RELEASE_OF_FOUR_FIELDS = (1, 22)
_MIB = 1 << 20
_MEBIBYTES = 64
_HOLD_SECONDS = 60.0
_POLL_SECONDS = 0.02


def release() -> tuple[int, ...]:
    """Returns the bridge's release, ``(1, 24, 1)``; empty if it is not installed."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version_of(PLUGIN))
    return tuple(int(part) for part in found.groups() if part) if found else ()


def device_of(lab: Lab) -> Outcome:
    """Returns what a process that acquired the card knows of it. An examination runs only one such process."""
    return lab.kept("identity", lambda: lab.run("device.identity"))


def identity(bridge: Bridge) -> Mapping[str, Any]:
    """Acquires the card. Returns its name and properties."""
    hpu = bridge.torch.hpu
    bridge.placed(bridge.torch.ones(1))
    return {
        "name": hpu.get_device_name(),
        "capability": hpu.get_device_capability(),
        "is_double": bool(getattr(importlib.import_module("habana_frameworks"), "DOUBLE", False)),
    }


@check(CHECKS, "H-01", "versions", "K-02")
def _versions(_: Lab) -> Iterator[LineFinding]:
    spec = util.find_spec("habana_frameworks")
    places = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(places[0] if places else ".", "torch", "required_version.txt")
    required = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    found = metadata.version("torch")
    same = found.split(".")[:2] == required.split(".")[:2]
    kind = "Intel's build" if "+git" in found else "the public build"
    seen = f"torch {found} ({kind}), the bridge wants {required or 'none in particular'}"
    yield judged("K-02", same or not required, seen)


@probe(CHECKS, "H-02", "when the environment is read", "K-01", "K-04", environment={CACHE_VARIABLE: None})
def late_environment(bridge: Bridge) -> Iterator[LineFinding]:
    """Sets the cache's directory after torch was imported, compiles, and looks whether files appeared there."""
    is_registered = bridge.is_registered()
    with tempfile.TemporaryDirectory() as late:
        os.environ[CACHE_VARIABLE] = sealed_setting(Path(late))
        bridge.compiled(graph(1))(*bridge.placed(*bridge.random()))
        bridge.flush()
        lacks = "the cache's directory, set later, was used"
        yield judged("K-01", not os.listdir(late), "the cache's directory, set later, stayed empty", lacks)
    yield judged("K-04", is_registered, "registered", "not registered")


@check(CHECKS, "H-03", "fields of the cache's setting", "K-27", needs=_NUMBERS)
def _fields(lab: Lab) -> Iterator[LineFinding]:
    setting = f"{lab.new_directory('recipes')},false,0,false"
    four = lab.run("device.compile_one", environment={CACHE_VARIABLE: setting})
    if four.is_busy:
        four.required()
    expects_four = release() >= _FIRST_RELEASE_OF_FOUR_FIELDS
    seen = "a fourth field is read" if four.is_whole else f"with a fourth field {four.problem}"
    yield judged("K-27", four.is_whole == expects_four, seen)


def compile_one(bridge: Bridge) -> Mapping[str, Any]:
    """Compiles a graph, for which the bridge acquires the card and reads its cache's setting."""
    inputs = bridge.random()
    return {"error": difference(bridge.compiled(graph(1))(*bridge.placed(*inputs)), graph(1)(*inputs))}


@probe(CHECKS, "H-04", "the mode", "K-03")
def mode(bridge: Bridge) -> Iterator[LineFinding]:
    """Looks at the mode of the process."""
    is_lazy = bridge.module("utils.internal").is_lazy()
    has_graphs = hasattr(bridge.torch.hpu, "wrap_in_hpu_graph")
    seen = f"{'lazy' if is_lazy else 'not lazy'}, {'with' if has_graphs else 'without'} HPU graphs"
    yield judged("K-03", not is_lazy and not has_graphs, seen)


@probe(CHECKS, "H-19", "switches at run time", "K-22", "K-23", needs=_NUMBERS)
def switches(bridge: Bridge) -> Iterator[LineFinding]:
    """Raises inside a temporary setting of a flag, and forbids compiling at run time."""
    config = bridge.module("internal.bridge_config")
    with contextlib.suppress(InterruptedError), config.env_setting("PT_COMPILE_ONLY_MODE", True):
        raise InterruptedError
    getter = getattr(config, "get_pt_compile_only_mode", None)
    if getter is None:
        yield from skipped(("K-23",), "this release does not tell")
    else:
        yield judged("K-23", bool(getter()), "it stays set", "it is set back")
    forbid = getattr(config, "set_pt_hpu_disallow_torch_compile", None)
    if forbid is None:
        yield from skipped(("K-22",), "this release has no such flag")
        return
    forbid(True)
    inputs = bridge.placed(*bridge.random())
    forbidden = refusal(lambda: bridge.compiled(graph(6))(*inputs))
    yield judged("K-22", bool(forbidden), "compiling raises", "it compiles all the same")


@check(CHECKS, "H-22", "HPU graphs", "K-33")
def _graphs(lab: Lab) -> Iterator[LineFinding]:
    """Judges HPU graphs. They belong to the lazy mode, which needs Intel's build of torch and which we do not use."""
    outcome = lab.run("device.hpu_graphs", environment={"PT_HPU_LAZY_MODE": "1"})
    if outcome.is_whole:
        yield judged("K-33", outcome.values["is_stale"], "those of before", "new ones")
    else:
        yield from skipped(("K-33",), "the lazy mode needs Intel's build of torch")


def hpu_graphs(bridge: Bridge) -> Mapping[str, Any]:
    """In the lazy mode, runs a captured module, and warms it up with other values of the same shape."""
    torch = bridge.torch
    module = torch.hpu.wrap_in_hpu_graph(torch.nn.Identity())
    ones, twos = bridge.placed(torch.ones(3), torch.full((3,), 2.0))
    module(ones)
    return {"is_stale": float(module(twos, warmup_mode=True).cpu()[0]) == 1.0}


@probe(CHECKS, "H-11", "operators outside graphs", "K-17")
def eager(bridge: Bridge) -> Iterator[LineFinding]:
    """Runs one operator outside a graph, at a new size."""
    (x,) = bridge.placed(bridge.torch.ones(3, 17))
    before = bridge.counts()
    refused = refusal(lambda: x + x)
    counts = bridge.counts().since(before)
    if not bridge.counters.knows_eager and not refused:
        yield from skipped(("K-17",), "this release does not tell how many it has compiled")
        return
    seen = f"{counts.eager_compiled} in its own cache, {counts.compiled} among compiled graphs"
    holds = counts.eager_compiled > 0 and counts.compiled == 0 and not refused
    yield judged("K-17", holds, seen, refused or seen)


@probe(CHECKS, "H-14", "narrow types", "K-20")
def casts(bridge: Bridge) -> Iterator[LineFinding]:
    """Sends values that 32 bits cannot hold to the device and back."""
    torch = bridge.torch
    values = torch.tensor([2**33 + 5]), torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    integer, precise = (tensor.cpu()[0] for tensor in bridge.placed(*values))
    excess = float(precise - 1.0)
    seen = f"2**33 + 5 comes back as {int(integer)}, 1 + 2**-40 as 1 + {excess:.1e}"
    yield judged("K-20", int(integer) == 5 and excess == 0, seen)


@probe(CHECKS, "H-21", "memory", "K-41")
def memory(bridge: Bridge) -> Iterator[LineFinding]:
    """Allocates and frees memory, and looks by how much the figures fall and rise."""
    torch = bridge.torch
    bridge.placed(torch.ones(1))
    free_before = torch.hpu.mem_get_info()[0]
    block = bridge.placed(torch.zeros(_MEBIBYTES * _MIB // 4))
    free_with = torch.hpu.mem_get_info()[0]
    del block
    taken, returned = free_before - free_with, torch.hpu.mem_get_info()[0] - free_with
    seen = f"{taken / _MIB:.0f} MiB taken for {_MEBIBYTES}, {returned / _MIB:.0f} given back"
    yield judged("K-41", min(taken, returned) >= _MEBIBYTES * _MIB, seen)


@probe(CHECKS, "H-20", "one process a card", "K-25")
def one_process(bridge: Bridge) -> Iterator[LineFinding]:
    """Asks for the card while another process holds it, and again when that was killed."""

    def attempt() -> str:
        return refusal(lambda: bridge.placed(bridge.torch.ones(1)))

    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        words = ["device.hold", json.dumps({"ready": str(ready)}), str(Path(folder, "result.json"))]
        with subprocess.Popen(probe_command(*words)) as holder:
            deadline = time.monotonic() + _HOLD_SECONDS
            while not ready.exists() and holder.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            refused = attempt()
            holder.kill()
    began = time.monotonic()
    while (problem := attempt()) and time.monotonic() < began + _HOLD_SECONDS:
        time.sleep(_POLL_SECONDS)
    lacks = problem or refused or "a second process has it, too"
    seen = f"a second process is refused; when the first was killed, it had it within {time.monotonic() - began:.0f} s"
    yield judged("K-25", BUSY in refused and not problem, seen, lacks)


def hold(bridge: Bridge, ready: str) -> Mapping[str, Any]:
    """Acquires the card, signals that by making the file `ready`, and holds the card for some time."""
    placed = bridge.placed(bridge.torch.ones(1))
    Path(ready).touch()
    time.sleep(_HOLD_SECONDS)
    return {"num_placed": len(placed)}
