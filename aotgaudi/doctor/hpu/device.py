"""Checks and probes of the software and the device: versions, environment, modes, types, memory, and access to the card."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from aotgaudi.backends.base import version_of
from aotgaudi.doctor.hpu.bridge import SHAPES, Bridge, difference, graph, refusal, told
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, Outcome, ProbeProcess, judged, skipped
from aotgaudi.gaudi.environment import CACHE_VARIABLE, sealed_setting
from aotgaudi.gaudi.identity import PLUGIN

_FIRST_RELEASE_OF_FOUR_FIELDS = (1, 22)


def release() -> tuple[int, ...]:
    """Returns the bridge's release, ``(1, 24, 1)``; empty if it is not installed."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version_of(PLUGIN))
    return tuple(int(part) for part in found.groups() if part) if found else ()


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


def _late_environment(lab: Lab) -> Iterator[LineFinding]:
    late = lab.new_directory("late")
    values = lab.run(
        "device.late_setting", environment={CACHE_VARIABLE: None}, directory=str(late)
    ).required()
    seen = "the cache's directory, set later, stayed empty"
    yield judged("K-01", not values["num_late"], seen, "the cache's directory, set later, was used")
    yield judged("K-04", values["was_registered"], "registered", "not registered")


def _fields(lab: Lab) -> Iterator[LineFinding]:
    setting = f"{lab.new_directory('recipes')},false,0"
    lab.run("device.compile_one", environment={CACHE_VARIABLE: setting}).required()
    four = lab.run("device.compile_one", environment={CACHE_VARIABLE: f"{setting},false"})
    if four.is_busy:
        four.required()
    expects_four = release() >= _FIRST_RELEASE_OF_FOUR_FIELDS
    seen = "a fourth field is read" if four.is_whole else f"with a fourth field {four.problem}"
    yield judged("K-27", four.is_whole == expects_four, seen)


def _mode(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("device.mode").required()
    is_lazy, has_graphs = values["is_lazy"], values["has_graphs"]
    seen = f"{'lazy' if is_lazy else 'not lazy'}, {'with' if has_graphs else 'without'} HPU graphs"
    yield judged("K-03", not is_lazy and not has_graphs, seen)


def _graphs(lab: Lab) -> Iterator[LineFinding]:
    """Judges HPU graphs. They belong to the lazy mode, which needs Intel's build of torch and which we do not use."""
    outcome = lab.run("device.hpu_graphs", environment={"PT_HPU_LAZY_MODE": "1"})
    if not outcome.is_whole:
        yield from skipped(("K-33",), "the lazy mode needs Intel's build of torch")
        return
    yield judged("K-33", outcome.values["is_stale"], "those of before", "new ones")


def _switches(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("device.switches").required()
    forbidden, stays_set = values["forbidden"], values["stays_set"]
    if forbidden is None:
        yield from skipped(("K-22",), "this release has no such flag")
    else:
        yield judged("K-22", bool(forbidden), "compiling raises", "it compiles all the same")
    if stays_set is None:
        yield from skipped(("K-23",), "this release does not tell")
    else:
        yield judged("K-23", stays_set, "it stays set", "it is set back")


_COMPILES = ("K-29", "K-37")

VERSION_CHECKS = (HpuCheck("H-01", "versions", ("K-02",), _versions),)
SOFTWARE_CHECKS = (
    HpuCheck("H-02", "when the environment is read", ("K-01", "K-04"), _late_environment),
    HpuCheck("H-03", "fields of the cache's setting", ("K-27",), _fields),
    HpuCheck("H-04", "the mode", ("K-03",), _mode),
    HpuCheck("H-19", "switches at run time", ("K-22", "K-23"), _switches, _COMPILES),
    HpuCheck("H-22", "HPU graphs", ("K-33",), _graphs),
)


_MIB = 1 << 20
_MEBIBYTES = 64
_HOLD_SECONDS = 60.0
_POLL_SECONDS = 0.02


def identity(lab: Lab) -> Outcome:
    """Returns what a process that acquired the card knows of it. An examination runs only one such process."""
    return lab.kept("identity", lambda: lab.run("device.identity"))


def _eager(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("device.eager").required()
    if not values["is_told"] and not values["refused"]:
        yield from skipped(("K-17",), "this release does not tell how many it has compiled")
        return
    seen = f"{values['eager_compiled']} in its own cache, {values['compiled']} among compiled graphs"
    holds = values["eager_compiled"] > 0 and values["compiled"] == 0 and not values["refused"]
    yield judged("K-17", holds, seen, values["refused"] or seen)


def _casts(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("device.casts").required()
    integer, excess = values["integer"], values["double_excess"]
    seen = f"2**33 + 5 comes back as {integer}, 1 + 2**-40 as 1 + {excess:.1e}"
    yield judged("K-20", integer == 5 and excess == 0, seen)


def _memory(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("device.memory", mebibytes=_MEBIBYTES).required()
    taken, returned = values["taken"], values["returned"]
    holds = min(taken, returned) >= values["asked"]
    seen = f"{taken / _MIB:.0f} MiB taken for {_MEBIBYTES}, {returned / _MIB:.0f} given back"
    yield judged("K-41", holds, seen)


def _one_process(lab: Lab) -> Iterator[LineFinding]:
    """Lets one process hold the card while another asks for it. Then kills the first, and asks again."""
    ready = lab.new_directory("hold") / "ready"
    with lab.running("device.hold", ready=str(ready), seconds=_HOLD_SECONDS) as process:
        _wait_for(ready, process)
        second = lab.run_once("device.identity")
    began = time.monotonic()
    third = lab.run("device.identity")
    seconds = time.monotonic() - began
    lacks = "a second process has it, too" if second.is_whole else third.problem or second.problem
    seen = f"a second process is refused; when the first was killed, another had it within {seconds:.0f} s"
    yield judged("K-25", second.is_busy and third.is_whole, seen, lacks)


def _wait_for(path: Path, process: ProbeProcess) -> None:
    deadline = time.monotonic() + _HOLD_SECONDS
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


DEVICE_CHECKS = (
    HpuCheck("H-11", "operators outside graphs", ("K-17",), _eager),
    HpuCheck("H-14", "narrow types", ("K-20",), _casts),
    HpuCheck("H-21", "memory", ("K-41",), _memory),
    HpuCheck("H-20", "one process a card", ("K-25",), _one_process),
)


# Probes


def probe_identity() -> Mapping[str, Any]:
    """Acquires the card. Returns its name and properties."""
    bridge = Bridge()
    hpu = bridge.torch.hpu
    (placed,) = bridge.placed(bridge.torch.ones(1))
    return {
        "name": hpu.get_device_name(),
        "capability": hpu.get_device_capability(),
        "is_double": bool(getattr(importlib.import_module("habana_frameworks"), "DOUBLE", False)),
        "device": placed.device.type,
    }


def probe_late_setting(directory: str) -> Mapping[str, Any]:
    """Sets the cache's directory after torch was imported, and compiles. Returns how many files appeared there."""
    bridge = Bridge()
    was_registered = bridge.is_registered()
    os.environ[CACHE_VARIABLE] = sealed_setting(Path(directory))
    bridge.compiled(graph(1))(*bridge.placed(*bridge.random(SHAPES)))
    bridge.flush()
    return {"num_late": len(list(Path(directory).iterdir())), "was_registered": was_registered}


def probe_compile_one() -> Mapping[str, Any]:
    """Compiles a graph, for which the bridge acquires the card and reads its cache's setting."""
    bridge = Bridge()
    inputs = bridge.random(SHAPES)
    found = bridge.compiled(graph(1))(*bridge.placed(*inputs))
    return {"error": difference(found, graph(1)(*inputs))}


def probe_mode() -> Mapping[str, Any]:
    """Returns the mode of the process."""
    bridge = Bridge()
    return {
        "is_lazy": bool(bridge.module("utils.internal").is_lazy()),
        "has_graphs": hasattr(bridge.torch.hpu, "wrap_in_hpu_graph"),
    }


def probe_hpu_graphs() -> Mapping[str, Any]:
    """In the lazy mode, runs a captured module, and warms it up with other values of the same shape."""
    bridge = Bridge()
    torch = bridge.torch
    module = torch.hpu.wrap_in_hpu_graph(torch.nn.Identity())
    ones, twos = bridge.placed(torch.ones(3), torch.full((3,), 2.0))
    module(ones)
    return {"is_stale": float(module(twos, warmup_mode=True).cpu()[0]) == 1.0}


def probe_eager() -> Mapping[str, Any]:
    """Runs one operator outside a graph, at a new size. Returns the counts, and the reason of a refusal."""
    bridge = Bridge()
    (x,) = bridge.placed(bridge.torch.ones(3, 17))
    before = bridge.counts()
    refused = refusal(lambda: x + x)
    seen = told(bridge.counts().since(before))
    return {**seen, "refused": refused, "is_told": bridge.counters.knows_eager}


def probe_casts() -> Mapping[str, Any]:
    """Sends values that 32 bits cannot hold to the device and back."""
    bridge = Bridge()
    torch = bridge.torch
    large, precise = bridge.placed(
        torch.tensor([2**33 + 5]), torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    )
    return {"integer": int(large.cpu()[0]), "double_excess": float(precise.cpu()[0] - 1.0)}


def probe_memory(mebibytes: int) -> Mapping[str, Any]:
    """Allocates and frees memory. Returns by how many bytes the figures fell and rose."""
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


def probe_hold(ready: str, seconds: float) -> Mapping[str, Any]:
    """Acquires the card, signals that by making the file `ready`, and holds the card for some time."""
    bridge = Bridge()
    placed = bridge.placed(bridge.torch.ones(1))
    Path(ready).touch()
    time.sleep(seconds)
    return {"num_placed": len(placed)}


def probe_switches() -> Mapping[str, Any]:
    """Raises inside a temporary setting of a flag, and forbids compiling at run time. Returns the effect of both.

    A value is None if this release has no such switch.
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
