"""vllm-gaudi: vLLM with the plugin for Intel Gaudi, whose graphs are recipes, one for each shape.

Facts about the bridge are numbered as in docs/reference/hpu-contract.md; facts about the plugin name its files at 091bbad.
Nothing here has run on a card.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import JsonValue

from aotgaudi.backends.base import Target
from aotgaudi.bucketing.bucket_file import FILE_VARIABLE
from aotgaudi.bundle.capture_receipt import Expected, FileKind
from aotgaudi.bundle.launch import GuestName, Launch
from aotgaudi.errors import CompileError, SpecError, store_error
from aotgaudi.gaudi.environment import (
    CACHE_VARIABLE,
    NEUTRAL,
    RECIPE_RULES,
    may_change_code,
    sealed_setting,
    sealed_variables,
)
from aotgaudi.gaudi.identity import SYSTEM_LIBRARIES, DigestMemory, Installation, LibraryDigests, find_cards
from aotgaudi.gaudi.recipes import RecipeDirectory, find_directories, scan
from aotgaudi.manifest.bucket_file import BucketFile, bucket_file_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.wrap.adapters.base import FOLDER, Environment, Flags, Phase, PlaceRoot, Repair, Shapes
from aotgaudi.wrap.adapters.vllm import LEFT_OUT, Vllm
from aotgaudi.wrap.events import ProcessLog, expected_of
from aotgaudi.wrap.flags import CONDITIONS, NEUTRAL_VARIABLES
from aotgaudi.wrap.launch_machine import Installed
from aotgaudi.wrap.values import parse_tokens, shown
from aotgaudi.wrap.variables import Hashed, VariableRules, is_secret


def find_machine(site_packages: str, root: Path = Path("/")) -> Target:
    """Returns what this machine is to a server whose packages lie in `site_packages`. Acquires no card.

    Raises:
        TargetError: there is no card, cards of several types, or no software for them.
        StoreError: a library cannot be read.
    """
    machine = find_cards(root).device_type()
    installation = Installation(Path(site_packages) / "habana_frameworks", root / SYSTEM_LIBRARIES, ())
    libraries = LibraryDigests.of(installation.components(), DigestMemory(None))
    return Target(backend="hpu", machine=machine, toolchain=dict(libraries.components))


FILE = f"{FOLDER}/vllm.buckets"
"""Where the bucket file lies below a place's root."""

NAMES = frozenset(
    {
        *("num-gpu-blocks-override", "block-size", "max-model-len", "max-num-batched-tokens", "max-num-seqs"),
        *("enable-chunked-prefill", "enable-prefix-caching"),
        *("VLLM_CONTIGUOUS_PA", "PT_HPU_SDPA_QKV_SLICE_MODE_FWD", "PT_HPU_SDPA_BC_FACTOR"),
        "VLLM_FUSEDSDPA_SLIDE_THLD",
    }
)
"""Flags and variables that are added where they are not given."""

PREFIXES = ("VLLM_", "PT_", "HABANA_", "HCCL_", "HCL_", "GC_", "QUANT_", "INC_")


class GaudiVariables(VariableRules):
    """As those of vLLM, and besides: what names a file counts by its content, wherever that lies."""

    def is_looked_at(self, name: str) -> bool:
        """Returns whether a variable may be read by what compiles."""
        return super().is_looked_at(name) or may_change_code(name)

    def counted(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that count. Raises SpecError for one that names a file which cannot be read."""
        counted = super().counted(environ)
        sealed = sealed_variables({name: environ[name] for name in counted if not is_secret(name)})
        return {name: sealed.get(name, value) for name, value in counted.items()}


RULES = GaudiVariables(
    prefixes=PREFIXES,
    neutral={**NEUTRAL_VARIABLES, **NEUTRAL},
    hashed={
        **CONDITIONS,
        FILE_VARIABLE: Hashed("where the bucket file lies; it is captured, and the shapes count"),
    },
)


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
    prefixes: tuple[str, ...] = PREFIXES
    neutral_variables: Mapping[str, str] = RULES.neutral
    hashed_variables: Mapping[str, Hashed] = RULES.hashed
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
        return RULES

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

    def expected(self, launch: Launch, processes: Iterable[ProcessLog]) -> Expected:
        """Returns what every warm start must show: every recipe found, no graph compiled.

        How often recipes are found is no fixed number: it follows from how requests share steps.
        """
        return expected_of(processes, roles=self.roles(launch), hooks=self.hooks, counted=(), zeros=_ZEROS)

    def residuals(self, launch: Launch) -> tuple[str, ...]:
        """Returns what it does at every start: a recipe cache saves the graph compiler, and nothing that is before it."""
        is_eager = launch.flags.get("enforce-eager", False) is not False
        return ("graphs are traced", *(() if is_eager else ("HPU graphs are captured",)))

    def shapes(self, spec: BuildSpec, flags: Flags, environ: Mapping[str, str]) -> Shapes:
        """Returns what it is given for the closed table of `spec`. Raises SpecError and CoverageError."""
        return shapes_of(spec, flags, environ)

    def settle(self, root: Path) -> None:
        """Puts its recipe caches in order, once it has ended. Raises CompileError for a recipe that was cut."""
        settle_recipes(root / RECIPES)


def settle_recipes(configured: Path) -> tuple[Path, ...]:
    """Puts every directory in order that ranks told to use `configured` have written, and returns them.

    Names lose their writer; of a graph that several have written one pair is kept; locks, announcements and the marks of
    graphs that compiled to nothing go.

    Raises:
        CompileError: a recipe was cut, or cannot be restored: constants, or several versions of the bridge's libraries.
        StoreError: a directory cannot be read or written.
    """
    directories = find_directories(configured)
    for directory in directories:
        found = scan(directory)
        _require_whole(found)
        try:
            _tidy(found)
        except OSError as error:
            raise store_error("put in order", directory, error) from error
    return directories


def _require_whole(found: RecipeDirectory) -> None:
    if found.broken:
        name, problem = next(iter(found.broken.items()))
        others = f" (and {len(found.broken) - 1} more)" if len(found.broken) > 1 else ""
        raise CompileError(
            f"{found.path}: {name} {problem}{others}: the server must end before it is stopped"
        )
    if found.constants:
        raise CompileError(
            f"{found.path}: holds constants ({found.constants[0]}), so a copy of it would not load"
            " (unset PT_HPU_COMPILE_GRAPH_FREEZE and what marks weights as constants)"
        )
    versions = sorted({(pair.synapse, pair.libraries) for pair in found.pairs})
    if len(versions) > 1:
        raise CompileError(f"{found.path}: holds recipes of several versions: {versions[0]}, {versions[1]}")


def _tidy(found: RecipeDirectory) -> None:
    kept = {path for pair in found.pairs for _, path in pair.files()}
    unwanted = {found.path / name for name in found.leftovers}
    unwanted |= {path for path in found.path.glob("*_syn*") if path not in kept and path.is_file()}
    for path in unwanted:
        path.unlink(missing_ok=True)
    for pair in found.pairs:
        for name, path in pair.files():
            path.rename(found.path / name)


_FALSE = frozenset({"", "0", "false", "f", "no", "n", "off"})


def shapes_of(spec: BuildSpec, flags: Flags, environ: Mapping[str, str]) -> Shapes:
    """Returns what a vllm-gaudi server is given so that it warms up the closed table of `spec`, and nothing else.

    What the command and the environment leave open is added; what they say otherwise is refused, for the proof is of the
    spec's limits.

    Raises:
        SpecError: the command or the environment is not that of the spec, or such a server reads no bucket file.
        CoverageError: the server would make buckets, and compile them, on live traffic; names the smallest step.
    """
    found = bucket_file_of(spec)
    _require_single_prompts(spec)
    _require_unset(found, environ)
    given = flags.values
    wanted: dict[str, JsonValue] = {**found.pinned, **found.switches}
    for name, value in wanted.items():
        if name in given:
            _require_same(name, given[name], value)
    variables = {name: value for name, value in found.variables(FILE).items() if name != FILE_VARIABLE}
    for name, value in variables.items():
        if name in environ and environ[name].strip().lower() != value:
            raise SpecError(name, f"is {environ[name]!r}, and the spec says {value!r}", "one of them changed")
    return Shapes(
        manifest_id=Manifest.of(found.spec).id,
        files={FILE: found.text},
        words=tuple(word for name in wanted if name not in given for word in _words(name, wanted[name])),
        variables={name: value for name, value in variables.items() if name not in environ},
        paths={FILE_VARIABLE: FILE},
    )


def _require_single_prompts(spec: BuildSpec) -> None:
    most = spec.limits.max_num_prefill_seqs
    if most > 1:
        raise SpecError(
            "limits.max_num_prefill_seqs",
            f"is {most}: for steps of several prompts the server may add buckets, and compile them, on live traffic",
            "1, and VLLM_PROMPT_BS_BUCKET_MAX unset",
        )


def _require_unset(found: BucketFile, environ: Mapping[str, str]) -> None:
    if environ.get(FILE_VARIABLE):
        raise SpecError(FILE_VARIABLE, "is set", "leave it out: --shapes writes the file")
    for name in found.unset:
        value = environ.get(name, "").strip().lower()
        if name in environ and (value in _FALSE) == (name == "VLLM_ENABLE_BUCKETING"):
            raise SpecError(
                name, f"is {environ[name]!r}", "leave it unset: the buckets are warmed up otherwise"
            )
    if environ.get("VLLM_PROMPT_BS_BUCKET_MAX", "1").strip() not in ("", "1"):
        raise SpecError("VLLM_PROMPT_BS_BUCKET_MAX", f"is {environ['VLLM_PROMPT_BS_BUCKET_MAX']!r}", "1")


def _require_same(name: str, given: JsonValue, wanted: JsonValue) -> None:
    if isinstance(wanted, bool):
        same = given is wanted
    else:
        same = isinstance(given, str) and parse_tokens(f"--{name}", given) == wanted
    if not same:
        raise SpecError(
            f"--{name}", f"is {given}, and the spec says {wanted}", "a spec of this command (--from-vllm)"
        )


def _words(name: str, value: JsonValue) -> Iterator[str]:
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    else:
        yield from (f"--{name}", str(value))
