"""Compiles a unit to a stripped shared object, with AOTInductor. Offline only: no other module compiles."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import lowering
from torch._inductor.runtime.runtime_utils import cache_dir  # type: ignore[attr-defined]

from aotgaudi.backends.base import CompiledUnit, Executable, Target, Unit
from aotgaudi.backends.inductor import (
    choose_entries,
    linear,
    packed_linear,
    paged_decode,
    prompt_attention,
    quantized_linear,
    sample_tokens,
    toolchain,
)
from aotgaudi.backends.inductor.check import check
from aotgaudi.backends.inductor.example_inputs import example_inputs
from aotgaudi.backends.inductor.levels import ISA_LEVELS, IsaLevel
from aotgaudi.backends.inductor.loops import shared_loops
from aotgaudi.backends.inductor.rewrite import rewrite
from aotgaudi.backends.inductor.runtime import ARTIFACT_FILE, InductorRuntime
from aotgaudi.backends.inductor.toolchain import Toolchain
from aotgaudi.errors import CompileError
from aotgaudi.graphs.canonical import OPEN_SIZE, InputSpec, from_text, is_open
from aotgaudi.graphs.export import export
from aotgaudi.source_digest import sha256_source

_FIXED_OPTIONS: dict[str, Any] = {
    "aot_inductor.debug_symbols": False,
    "aot_inductor.enable_frame_pointer": False,
    "aot_inductor.enable_line_tables": False,
    "cpp.vec_isa_ok": True,
    "epilogue_fusion": False,
    "force_disable_caches": True,
}
"""Options that keep paths and probes out: no debug sections, no test compiles of the instruction set (the
probe has read it from the CPU), no reuse of a graph cache that we do not key. Nothing is fused into our templates
(template.py). An older torch without one of these options lacks the feature, too."""


class InductorCompiler:
    """Compiles units for one target. One instance a worker process; not thread-safe."""

    def __init__(self, target: Target) -> None:
        """Raises CompileError for a target that this version does not know."""
        self._target = target
        flags = {
            name: _parse(value) for name, value in target.flags.items() if not name.startswith("aotgaudi.")
        }
        known = set(torch._inductor.list_options())
        fixed = {name: value for name, value in _FIXED_OPTIONS.items() if name in known}
        self._options = {**fixed, **flags}
        self._level = _level(target)
        self._toolchain = _toolchain(target, self._level)

    def compile(self, unit: Unit, work_dir: Path) -> CompiledUnit:
        """Compiles, strips, loads and compares with eager. Raises CompileError naming the unit."""
        started = time.perf_counter()
        graph, specs = from_text(unit.text)
        work_dir = work_dir.absolute()
        library = work_dir / ARTIFACT_FILE
        compiled = copy.deepcopy(graph)
        layouts = rewrite(compiled, specs, self._level)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._compile(compiled, specs, library, unit.label)
            _strip(library)
            _refuse_companions(work_dir, unit.label)
            self._refuse_paths(library, unit.label)
            runtime = InductorRuntime(self._target)
            executable = _Preparing(runtime, runtime.load({ARTIFACT_FILE: library}), layouts)
            error, tolerance = check(graph, specs, executable, unit.label)
        return CompiledUnit(
            files={ARTIFACT_FILE: library},
            compile_seconds=time.perf_counter() - started,
            max_abs_error=error,
            tolerance=tolerance,
            layouts=layouts,
        )

    def _compile(self, graph: fx.GraphModule, specs: list[InputSpec], library: Path, label: str) -> None:
        options = {**self._options, "aot_inductor.output_path": str(library)}
        inputs = example_inputs(specs, seed=0)
        try:
            graph = _opened(graph, specs, inputs)
            with _our_lowerings(), self._toolchain.applied(library.parent) as choices:
                options |= choices
                with self._toolchain.one_interface(options), shared_loops(graph.graph):
                    torch._inductor.aot_compile(graph, tuple(inputs), options=options)
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(f"{label}: {type(error).__name__}: {error}") from error

    def _refuse_paths(self, library: Path, label: str) -> None:
        found = self._toolchain.path_in(library, library.parent)
        if found is not None:
            raise CompileError(f"{label}: the compiled object holds a path of this machine: {found}")


@contextlib.contextmanager
def _our_lowerings() -> Iterator[None]:
    """While active, inductor compiles our operators, and others with better code than its own."""
    known: dict[Any, Any] = lowering.lowerings
    ours = {
        **choose_entries.LOWERINGS,
        **linear.LOWERINGS,
        **packed_linear.LOWERINGS,
        **quantized_linear.LOWERINGS,
        **paged_decode.LOWERINGS,
        **prompt_attention.LOWERINGS,
        **sample_tokens.LOWERINGS,
    }
    before = {target: known[target] for target in ours if target in known}
    known.update(ours)
    try:
        yield
    finally:
        for target in ours:
            del known[target]
        known.update(before)


class _Preparing:
    """Runs a unit on inputs in the order of the checkpoint."""

    def __init__(self, runtime: InductorRuntime, unit: Executable, layouts: Mapping[int, str]) -> None:
        self._runtime, self._unit, self._layouts = runtime, unit, layouts

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Reorders the inputs that the unit takes in another layout, and runs it."""
        prepared = list(inputs)
        for number, layout in self._layouts.items():
            prepared[number] = self._runtime.prepare(layout, inputs[number])
        return self._unit.run(prepared)


def _level(target: Target) -> IsaLevel:
    name = target.flags.get("aotgaudi.isa", "")
    if name not in ISA_LEVELS:
        raise CompileError(f"target: the instruction set {name!r} is not one of {', '.join(ISA_LEVELS)}")
    return ISA_LEVELS[name]


def _toolchain(target: Target, level: IsaLevel) -> Toolchain:
    flags = target.flags.get("aotgaudi.compiler_flags", "")
    # Of our code only the toolchain's counts: changes elsewhere do not change what it caches.
    code = {"compile_code": sha256_source([Path(toolchain.__file__)])}
    identity = json.dumps({**target.toolchain, **target.flags, **_FIXED_OPTIONS, **code}, sort_keys=True)
    return Toolchain(level, tuple(flags.split()), Path(cache_dir()) / "toolchains", identity)


def _opened(graph: fx.GraphModule, specs: list[InputSpec], inputs: list[Tensor]) -> fx.GraphModule:
    """Returns `graph` in the form that makes inductor leave a size open; `graph` itself if no size is open."""
    if not any(map(is_open, specs)):
        return graph
    open_size = torch.export.Dim("N", min=2)
    sizes = tuple({spec[1].index(OPEN_SIZE): open_size} if is_open(spec) else None for spec in specs)
    opened: fx.GraphModule = export(graph, tuple(inputs), sizes).module(check_guards=False)
    return opened


def _parse(value: str) -> Any:
    return int(value) if value.isdigit() else value


def _strip(library: Path) -> None:
    sections = [f"--remove-section={name}" for name in (".comment", ".note.gnu.build-id")]
    subprocess.run(
        [shutil.which("strip") or "strip", "--strip-all", *sections, os.fspath(library)], check=True
    )


def _refuse_companions(work_dir: Path, label: str) -> None:
    """Raises CompileError if the object needs operators without a C interface (a JSON file names them)."""
    companion = work_dir / f"{Path(ARTIFACT_FILE).stem}.json"
    if companion.exists():
        raise CompileError(
            f"{label}: calls operators that have no C interface: {companion.read_text()[:300]}"
        )
