"""Checks of what is installed and how it starts: versions, when the environment is read, the mode, switches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from aotgaudi.backends.base import version_of
from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding, judged, skipped
from aotgaudi.doctor.hpu.lab import Lab
from aotgaudi.gaudi.cache_setting import VARIABLE as CACHE_VARIABLE
from aotgaudi.gaudi.identity import PLUGIN

_FIRST_RELEASE_OF_FOUR_FIELDS = (1, 22)


def release() -> tuple[int, ...]:
    """Returns the bridge's release, ``(1, 24, 1)``; empty where it is not installed."""
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
    """HPU graphs are of the lazy mode, which wants Intel's build of torch, and which we do not use."""
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

VERSIONS = (HpuCheck("H-01", "versions", ("K-02",), _versions),)
CHECKS = (
    HpuCheck("H-02", "when the environment is read", ("K-01", "K-04"), _late_environment),
    HpuCheck("H-03", "fields of the cache's setting", ("K-27",), _fields),
    HpuCheck("H-04", "the mode", ("K-03",), _mode),
    HpuCheck("H-19", "switches at run time", ("K-22", "K-23"), _switches, _COMPILES),
    HpuCheck("H-22", "HPU graphs", ("K-33",), _graphs),
)
