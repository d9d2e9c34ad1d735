"""vllm-gaudi: where its recipes lie, what it must be told, and what a warm start of it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from aotgaudi.backends.base import Target
from aotgaudi.bucketing.bucket_file import FILE_VARIABLE
from aotgaudi.bundle.capture_receipt import Expected, FileKind, learnt
from aotgaudi.bundle.launch import GuestName, Launch
from aotgaudi.errors import SpecError
from aotgaudi.gaudi.cache_setting import VARIABLE as CACHE_VARIABLE
from aotgaudi.gaudi.cache_setting import sealed_setting
from aotgaudi.gaudi.environment import RECIPE_RULES
from aotgaudi.wrap.adapters.base import Environment, Event, Flags, Phase, PlaceRoot, Repair
from aotgaudi.wrap.adapters.identity import Installed
from aotgaudi.wrap.adapters.shapes import Shapes
from aotgaudi.wrap.adapters.variables import Hashed, VariableRules
from aotgaudi.wrap.adapters.vllm.guest import LEFT_OUT, Vllm
from aotgaudi.wrap.adapters.vllm_gaudi import recipes, variables
from aotgaudi.wrap.adapters.vllm_gaudi.machine import find_machine
from aotgaudi.wrap.adapters.vllm_gaudi.variables import FILE, NAMES
from aotgaudi.wrap.vllm.values import shown

if TYPE_CHECKING:
    from aotgaudi.spec.build_spec import BuildSpec

RECIPES = "cache/hpu"
"""Where recipes lie below a place's root; in inference mode ranks append their number to the text of the path."""
METRICS = "tmp/hpu-metrics.json"
"""Where the bridge writes what it has counted when a process ends (``saver.py``)."""

_FORCED_AOT = "VLLM_FORCE_AOT_LOAD"
_ROOTS_OF_OTHER_DEVICES = frozenset(
    {"CUDA_CACHE_PATH", "FLASHINFER_WORKSPACE_BASE", "CUTE_DSL_CACHE_DIR", "AITER_JIT_DIR"}
)
_COMPILES_LATER: Mapping[str, str] = {
    "VLLM_SKIP_WARMUP": "nothing is warmed up: each shape is compiled by the first request that needs it",
}
_ZEROS = ("hpu.graph_compilation", "hpu.recipe_misses")


class VllmGaudi(Vllm):
    """See the module, and `base.Guest`."""

    name: GuestName = "vllm-gaudi"
    prefixes: tuple[str, ...] = variables.PREFIXES
    neutral_variables: Mapping[str, str] = variables.RULES.neutral
    hashed_variables: Mapping[str, Hashed] = variables.RULES.hashed
    left_out: tuple[tuple[str, str], ...] = (
        *LEFT_OUT,
        (f"{RECIPES}*/temp_*", "graphs that were being compiled"),
        (f"{RECIPES}*/*.hash_content", "what the bridge's debugging writes"),
        ("tmp/hpu-metrics*", "what the bridge counted in one run"),
    )
    repairs: tuple[Repair, ...] = ()
    hooks: tuple[str, ...] = ("audit", "habana.metrics")
    shape_names: frozenset[str] = NAMES

    @property
    def variable_rules(self) -> VariableRules:
        """How its variables are told apart."""
        return variables.RULES

    def require_witnessed(self, flags: Flags, environ: Mapping[str, str]) -> None:
        """Raises SpecError for what vLLM's adapter refuses, and for a server whose shapes are not fixed before it starts."""
        super().require_witnessed(flags, environ)
        for name, reason in _COMPILES_LATER.items():
            if environ.get(name, "0").strip().lower() not in ("", "0", "false"):
                raise SpecError(name, f"is {shown(environ[name])}", reason)
        file = environ.get(FILE_VARIABLE, "")
        if file and not file.endswith(f"/{FILE}"):
            problem = f"is {shown(file)}, whose content would be no part of the launch"
            raise SpecError(
                FILE_VARIABLE, problem, '--shapes SPEC, with strategy = "file" for one of your own'
            )
        if "num-gpu-blocks-override" not in flags.values:
            raise SpecError(
                "--num-gpu-blocks-override",
                "is not given: the server then counts the KV blocks that fit its free memory, and another count is another"
                " shape of every recipe",
                "a number, or --shapes SPEC",
            )

    def roots(self, place: PlaceRoot) -> dict[str, str]:
        """Returns the variables that name its caches; that of the recipes, which holds more than a path, is not one."""
        found = super().roots(place)
        return {name: path for name, path in found.items() if name not in _ROOTS_OF_OTHER_DEVICES}

    def environment(self, place: PlaceRoot, phase: Phase, environ: Mapping[str, str]) -> Environment:
        """Returns what its environment must be in a phase.

        The recipe cache is one flat directory of all ranks. It is never deleted at start, which every worker would do for
        itself (K-37), and nothing is evicted. vLLM's own artifacts of compiling are not made on this platform
        (vllm_gaudi/platform.py: CompilationMode.NONE), so it is not told to insist on them.
        """
        base = super().environment(place, phase, environ)
        rules = RECIPE_RULES
        return Environment(
            {
                **{name: value for name, value in base.set.items() if name != _FORCED_AOT},
                **rules.settings,
                CACHE_VARIABLE: sealed_setting(Path(place.below(RECIPES))),
                "PT_HPU_METRICS_FILE": place.below(METRICS),
                "PT_HPU_METRICS_DUMP_TRIGGERS": "process_exit",
            },
            tuple(dict.fromkeys((*base.unset, _FORCED_AOT, *rules.removed))),
        )

    def kind_of(self, path: str) -> FileKind:
        """Returns what a captured file is, by its path relative to the place's root."""
        return "recipe" if fnmatchcase(path, f"{RECIPES}*/*_syn*") else super().kind_of(path)

    def target(self, installed: Installed) -> Target:
        """Returns what this machine is to it. Raises TargetError where there is no card, or no software for it."""
        return find_machine(installed.site_packages)

    def expected(self, launch: Launch, events: Iterable[Event]) -> Expected:
        """Returns what every warm start must show: every recipe found, no graph compiled.

        How often recipes are found is no fixed number: it follows from how requests share steps.
        """
        return learnt(events, roles=self.roles(launch), hooks=self.hooks, counted=(), zeros=_ZEROS)

    def residuals(self, launch: Launch) -> tuple[str, ...]:
        """Returns what it does at every start: a recipe cache saves the graph compiler, and nothing that is before it."""
        is_eager = launch.flags.get("enforce-eager", False) is not False
        return ("graphs are traced", *(() if is_eager else ("HPU graphs are captured",)))

    def shapes(self, spec: BuildSpec, flags: Flags, environ: Mapping[str, str]) -> Shapes:
        """Returns what it is given for the closed table of `spec`. Raises SpecError and CoverageError."""
        from aotgaudi.wrap.adapters.vllm_gaudi.shapes import (
            shapes_of,  # It brings all rules of bucketing with it.
        )

        return shapes_of(spec, flags, environ)

    def settle(self, root: Path) -> None:
        """Puts its recipe caches in order, once it has ended. Raises CompileError for a recipe that was cut."""
        recipes.settle(root / RECIPES)
