"""vllm-gaudi: vLLM with the plugin for Intel Gaudi. Its graphs are recipes, one for each shape.

Facts about the bridge are numbered as in docs/reference/hpu-contract.md; facts about the plugin name its files at 091bbad.
Nothing here has run on a card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from aotgaudi.backends.base import Target
from aotgaudi.bucketing.bucket_file import DYNAMIC_SHAPES_VARIABLE, FILE_VARIABLE, cut_bucket_file
from aotgaudi.bundle.launch import Launch
from aotgaudi.commands.flags import CONDITIONS, NEUTRAL_FLAGS, NEUTRAL_VARIABLES
from aotgaudi.commands.variables import Hashed, VariableRules, is_secret
from aotgaudi.commands.words import FALSE_WORDS, parse_tokens
from aotgaudi.errors import CompileError, SpecError, shown, store_error
from aotgaudi.gaudi.environment import (
    CACHE_VARIABLE,
    NEUTRAL,
    RECIPE_RULES,
    may_change_code,
    sealed_setting,
    sealed_variables,
)
from aotgaudi.gaudi.identity import (
    SYSTEM_LIBRARIES,
    Installation,
    find_cards,
    library_digests,
)
from aotgaudi.gaudi.live_graphs import live_graphs
from aotgaudi.gaudi.recipes import RecipeDirectory, find_directories, require_restorable, require_room, scan
from aotgaudi.wrap.adapters.base import SHAPES_FOLDER, Flags, Phase, Shapes, flag_words
from aotgaudi.wrap.adapters.vllm import KINDS, LEFT_OUT, ROOTS, VLLM, max_logprobs, refuse, settings
from aotgaudi.wrap.exercise import Feature, ServerLimits, sampler_batches, start_batches
from aotgaudi.wrap.launch_machine import Device, Installed

if TYPE_CHECKING:
    from aotgaudi.manifest.bucket_file import BucketFile
    from aotgaudi.spec.build_spec import BuildSpec


def find_machine(site_packages: str, root: Path = Path("/")) -> Target:
    """Returns this machine as the target of a server whose packages lie in `site_packages`. Acquires no card.

    Hashes the libraries that compile, because the bridge's own check gives the same result whatever they contain (K-38).

    Raises:
        TargetError: there is no card, or cards of several types, or no software for them.
        StoreError: a library cannot be read.
    """
    machine = find_cards(root).device_type()
    installation = Installation(Path(site_packages) / "habana_frameworks", root / SYSTEM_LIBRARIES, ())
    return Target(backend="hpu", machine=machine, toolchain=dict(library_digests(installation, None)))


PLUGIN = "vllm-gaudi"
FILE = f"{SHAPES_FOLDER}/vllm.buckets"
"""Where the bucket file lies, relative to a sandbox's root."""

_NAMES = f"""
    num-gpu-blocks-override block-size max-model-len max-num-batched-tokens max-num-seqs
    enable-chunked-prefill enable-prefix-caching
    VLLM_CONTIGUOUS_PA PT_HPU_SDPA_QKV_SLICE_MODE_FWD PT_HPU_SDPA_BC_FACTOR VLLM_FUSEDSDPA_SLIDE_THLD
    {DYNAMIC_SHAPES_VARIABLE}
    """
NAMES = frozenset(_NAMES.split())
"""Flags and variables that `shapes` adds unless they are given."""

PREFIXES = ("VLLM_", "PT_", "HABANA_", "HCCL_", "HCL_", "GC_", "QUANT_", "INC_")


class GaudiVariables(VariableRules):
    """The rules of vLLM. In addition, a variable that names a file counts by the file's content, not by its path."""

    def is_looked_at(self, name: str) -> bool:
        """Returns whether a variable may be read by what compiles."""
        return super().is_looked_at(name) or may_change_code(name)

    def keyed(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that count in the key. Raises SpecError if one names a file that cannot be read."""
        keyed = super().keyed(environ)
        sealed = sealed_variables({name: environ[name] for name in keyed if not is_secret(name)})
        return {name: sealed.get(name, value) for name, value in keyed.items()}


RULES = GaudiVariables(
    prefixes=PREFIXES,
    neutral={**NEUTRAL_VARIABLES, **NEUTRAL},
    hashed={
        **CONDITIONS,
        FILE_VARIABLE: Hashed("where the bucket file lies; it is captured, and the shapes count"),
    },
)


RECIPES = "cache/hpu"
"""Where recipes lie, relative to a sandbox's root. In inference mode each rank appends its number to this path."""

METRICS = "tmp/hpu-metrics.json"
"""Where the bridge writes its counters when a process ends (``saver.py``), relative to a sandbox's root."""

_ROOTS_OF_OTHER_DEVICES = frozenset(
    {"CUDA_CACHE_PATH", "FLASHINFER_WORKSPACE_BASE", "CUTE_DSL_CACHE_DIR", "AITER_JIT_DIR"}
)
_COMPILES_LATER: Mapping[str, str] = {
    "VLLM_SKIP_WARMUP": "nothing is warmed up: each shape is compiled by the first request that needs it",
}


def _refuse(flags: Flags, environ: Mapping[str, str]) -> None:
    """Raises SpecError for what vLLM's adapter refuses, and for shapes that are not fixed before the server starts."""
    refuse(flags, environ)
    for name, reason in _COMPILES_LATER.items():
        if environ.get(name, "0").strip().lower() not in ("", "0", "false"):
            raise SpecError(name, f"is {shown(environ[name])}", reason)
    file = environ.get(FILE_VARIABLE, "")
    if file and not file.endswith(f"/{FILE}"):
        problem = f"is {shown(file)}, whose content would be no part of the launch"
        raise SpecError(FILE_VARIABLE, problem, '--shapes SPEC, with strategy = "file" for one of your own')
    if "num-gpu-blocks-override" not in flags.values:
        raise SpecError(
            "--num-gpu-blocks-override",
            "is not given: the server then counts the KV blocks that fit its free memory, and another count is another"
            " shape of every recipe",
            "a number, or --shapes SPEC",
        )


def _settings(root: Path, phase: Phase, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables of a phase.

    All ranks share one flat directory of recipes. It is not deleted at start, which each worker would otherwise do for
    itself (K-37), and nothing is evicted. vLLM makes no compile artifacts on this platform (vllm_gaudi/platform.py:
    CompilationMode.NONE), so it is not required to find them.
    """
    return {
        **settings(root, phase, environ),
        **dict.fromkeys(("VLLM_FORCE_AOT_LOAD", *RECIPE_RULES.removed)),
        **RECIPE_RULES.settings,
        CACHE_VARIABLE: sealed_setting(root / RECIPES),
        "PT_HPU_METRICS_FILE": str(root / METRICS),
        "PT_HPU_METRICS_DUMP_TRIGGERS": "process_exit",
    }


def _features(flags: Flags, config: Mapping[str, JsonValue], device: Device) -> tuple[Feature, ...]:
    """Returns the features of vLLM, without the requests for log-probabilities of prompts where they would end the engine.

    The prompt's hidden states of qwen3_moe have no dimension for the batch, and the first row is taken for all
    (``non_flattened_hidden_states[i]`` in hpu_model_runner.py 4414, v0.26.0). With LoRA, logits of prompts meet the mask of
    the step's last tokens, which has other rows (``dispatch_bgmv_linear`` in extension/ops.py 526). The double showed both.
    """
    found = VLLM.features(flags, config, device)
    if config.get("model_type") == "qwen3_moe":
        why = "this model"
    elif flags.values.get("enable-lora", False) is not False:
        why = "--enable-lora"
    else:
        return found
    gap = f"prompt_logprobs, which end the engine of vllm-gaudi 0.26.0 with {why}"
    return tuple(_without_prompt_logprobs(one, gap) for one in found)


def _without_prompt_logprobs(feature: Feature, gap: str) -> Feature:
    safe = tuple(one for one in feature.requests if not any("prompt_logprobs" in body for body in one.bodies))
    gaps = "; ".join(filter(None, (feature.gap, gap)))
    return feature if safe == feature.requests else replace(feature, requests=safe, gap=gaps)


def _residuals(launch: Launch) -> tuple[str, ...]:
    """Returns what every start repeats: a recipe cache saves the graph compiler's work only."""
    is_eager = launch.flags.get("enforce-eager", False) is not False
    return ("graphs are traced", *(() if is_eager else ("HPU graphs are captured",)))


def _shapes(spec: BuildSpec, flags: Flags, environ: Mapping[str, str], installed: Installed | None) -> Shapes:
    """Returns what makes a vllm-gaudi server warm up the closed table of `spec`, and nothing else.

    Adds what the command and the environment leave open. Refuses other values that they set, because the proof holds
    only for the spec's limits.

    Raises:
        SpecError: the spec is for another command or environment, or the server's version reads no bucket file.
        CoverageError: the server would create and compile buckets under live traffic. Names the smallest step.
    """
    # Imported only here: `aotgaudi run` needs no manifest.
    from aotgaudi.manifest.bucket_file import bucket_file_of
    from aotgaudi.manifest.coverage import situation_of
    from aotgaudi.manifest.manifest import Manifest

    _require_version(spec, installed)
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
        word = environ.get(name, value).strip().lower()
        if word != value and not {word, value} <= FALSE_WORDS:
            raise SpecError(name, f"is {environ[name]!r}, and the spec says {value!r}", "one of them changed")
    room = ServerLimits(max_model_len=found.spec.limits.max_model_len)
    sizes = sorted({size for size, _, _ in found.decode})
    situation = situation_of(found.spec, max_logprobs(given))
    widths = () if situation is None else situation.logprob_widths
    proved = (one.model_copy(update={"at_start": False}) for one in sampler_batches(sizes, room, widths))
    return Shapes(
        manifest_id=Manifest.of(found.spec).id,
        files={FILE: found.text},
        words=tuple(word for name in wanted if name not in given for word in flag_words(name, wanted[name])),
        variables={name: value for name, value in variables.items() if name not in environ},
        paths={FILE_VARIABLE: FILE},
        requests=(*start_batches(sizes, room, widths), *proved),
        live_graphs=() if situation is None else live_graphs(situation),
    )


def _slices(files: Mapping[str, str], num: int) -> tuple[Mapping[str, str], ...]:
    """Returns bucket files that together list the buckets of the one in `files`. Raises SpecError if there is none."""
    if FILE not in files:
        raise SpecError("--shards", "is given without --shapes", "--shapes SPEC, whose buckets are cut")
    return tuple({**files, FILE: text} for text in cut_bucket_file(files[FILE], num))


VLLM_GAUDI = replace(
    VLLM,
    name="vllm-gaudi",
    neutral_flags=NEUTRAL_FLAGS,
    refuse=_refuse,
    variable_rules=RULES,
    cache_roots={name: path for name, path in ROOTS.items() if name not in _ROOTS_OF_OTHER_DEVICES},
    settings=_settings,
    left_out=(
        *LEFT_OUT,
        (f"{RECIPES}*/temp_*", "graphs that were being compiled"),
        (f"{RECIPES}*/*.hash_content", "what the bridge's debugging writes"),
        ("tmp/hpu-metrics*", "what the bridge counted in one run"),
    ),
    kinds=((f"/{RECIPES}*/*_syn*", "recipe"), *KINDS),
    repairs=(),
    hooks=("audit", "habana.metrics"),
    counted=(),  # How often recipes are found depends on which requests share steps.
    zeros=("hpu.graph_compilation", "hpu.recipe_misses"),
    device=lambda _: "hpu",
    target=lambda installed: find_machine(installed.site_packages),
    features=_features,
    residuals=_residuals,
    settle=lambda root: settle_recipes(root / RECIPES),
    shape_names=NAMES,
    make_shapes=_shapes,
    cut_shapes=_slices,
)
"""vLLM with the plugin for Gaudi. Everything that is not said here is as in vLLM."""


def settle_recipes(configured: Path) -> tuple[Path, ...]:
    """Puts in order all directories that the ranks wrote for the path `configured`, and returns them.

    The bridge writes in a thread, without rename or checksum (K-26, K-35), so a file of a pair may be truncated. The bridge
    would treat such a recipe as a miss and silently compile it again. In a cache on a shared file system, file names contain
    the writer's name (``hpu_recipe_cache.cpp``). We remove the writer from the names, keep one pair of each graph that
    several ranks wrote, and delete locks, announcements and the marks of empty graphs.

    Raises:
        CompileError: a recipe is truncated, a directory holds constants, or its recipes are from several versions of the
            bridge's libraries.
        StoreError: a directory cannot be read or written, or takes no more data.
    """
    directories = find_directories(configured)
    for directory in directories:
        found = scan(directory)
        _require_whole(found)
        require_restorable(found)
        try:
            _tidy(found)
        except OSError as error:
            raise store_error("put in order", directory, error) from error
    return directories


def _require_whole(found: RecipeDirectory) -> None:
    if found.broken:
        require_room(found.path, f"recipes (the first: {next(iter(found.broken))})")
        name, problem = next(iter(found.broken.items()))
        others = f" (and {len(found.broken) - 1} more)" if len(found.broken) > 1 else ""
        raise CompileError(
            f"{found.path}: {name} {problem}{others} (the server must end by itself after SIGTERM)"
        )


def _tidy(found: RecipeDirectory) -> None:
    kept = {path for pair in found.pairs for _, path in pair.files()}
    unwanted = {found.path / name for name in found.leftovers}
    unwanted |= {path for path in found.path.glob("*_syn*") if path not in kept and path.is_file()}
    for path in unwanted:
        path.unlink(missing_ok=True)
    for pair in found.pairs:
        for name, path in pair.files():
            path.rename(found.path / name)


def _require_version(spec: BuildSpec, installed: Installed | None) -> None:
    """Raises SpecError if the installed plugin makes other buckets than the version that the spec names."""
    from aotgaudi.bucketing.versions import find_version, have_same_rules, released_as

    text = "" if installed is None else installed.distributions.get(PLUGIN, "").partition(" ")[0]
    named, here = find_version(spec.bucketing.version), released_as(text)
    if here is None or have_same_rules(named, here):
        return
    is_that_release = text.startswith(here.name.rpartition("@v")[2])
    if named.date > here.date and not is_that_release:  # Between two known versions, either's rules may hold.
        return
    raise SpecError(
        "bucketing.version",
        f"is {named.name}, and {PLUGIN} {text} is installed, which makes other buckets",
        f'version = "{here.name}", or the plugin that the spec names',
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
        if name in environ and (value in FALSE_WORDS) == (name == "VLLM_ENABLE_BUCKETING"):
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
