"""Environment variables on Gaudi: which ones change compiled code, and which ones a process needs before it imports torch.

A variable that may change code is sealed. This applies to every variable whose name begins like those of the bridge, the
graph compiler, its kernels or the collectives, unless `NEUTRAL` lists it with a reason. vLLM's own variables change nothing
here; `aotgaudi.from_vllm.command` has them. The bridge reads nearly all variables once, when it is imported, which
``import torch`` may do (K-01). Later settings have no effect, so we start processes with what they need.

`CACHE_VARIABLE` says where the bridge keeps recipes and what it may do to them:
``<directory>[,<delete at start>[,<limit in MiB>[,<on a shared file system>]]]``. A process reads it once, when it acquires
the device. Bridges before about 1.22 abort at a fourth field (K-27), so we never write one.
Source: ``recipe_cache_config.cpp`` of the bridge.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from aotgaudi.digest import canonical_json, sha256_bytes, sha256_file
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.files import read_regular

CACHE_VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"

BUSY, ABSENT = "acquire failed", "No devices found"
"""The bridge's messages if another process has the card (K-25), and if it sees no card."""

COMPILE_OPTIONS: Mapping[str, bool] = MappingProxyType(
    {"use_eager_fallback": False, "keep_input_mutations": True, "use_graph_freezing": False}
)
"""Options of the backend: an operator that is not lowered is an error (K-18), caches are written in place (K-21), and
weights are no constants (K-32)."""


def recipe_directory() -> Path:
    """Returns this process's directory of recipes. Raises TargetError if it has none."""
    directory = os.environ.get(CACHE_VARIABLE, "").partition(",")[0]
    if not directory:
        raise TargetError(f"target: {CACHE_VARIABLE} names no directory in this process")
    return Path(directory)


def sealed_setting(directory: Path) -> str:
    """Returns the variable's value for a directory that the bridge must not change: nothing is deleted or evicted.

    Raises:
        SpecError: the path has a comma, which the bridge would take for the end of the field.
    """
    if "," in str(directory):
        raise SpecError(
            str(directory), "has a comma, which ends a field of " + CACHE_VARIABLE, "another directory"
        )
    return f"{directory},false,0"


_MAY_CHANGE_CODE = re.compile(
    r"(PT_|HABANA_|HCCL_|HCL_|GC_|GCFG_|ENABLE_|DISABLE_|SRAM_|MME_|TPC_|FUSER_|RUNTIME_|QUANT|HPU_|EXP_FLAGS|SYN"
    r"|GAUDI|EXPERIMENTAL_|COMPLEX_GUID|TORCH|INC_).*"
    r"|DETERMINISTIC_MODE|RUN_TPC_FUSER|MAX_EXPERTS_PER_SLICE"
)

NEUTRAL: Mapping[str, str] = MappingProxyType(
    {
        name: reason
        for reason, names in {
            "where recipes are kept; their content is sealed": f"{CACHE_VARIABLE} PT_RECIPE_CACHE_DUMP_DEBUG",
            "counts and writes what happens": """
                PT_HPU_METRICS_FILE PT_HPU_METRICS_FILE_FORMAT PT_HPU_METRICS_DUMP_TRIGGERS PT_HPU_METRICS_GC_DETAILS
                HABANA_PT_METRICS_FILE PT_HPU_ENABLE_CACHE_METRICS""",
            "logs": "HABANA_LOGS PT_HPU_PRINT_STATS PT_HPU_PRINT_STATS_TABLE TORCH_LOGS",
            "profiles": "HABANA_PROFILE HABANA_PROFILE_WRITE_HLTV",
            "where other compilers keep their files": "TORCHINDUCTOR_CACHE_DIR TORCH_HOME TORCH_EXTENSIONS_DIR",
            "which card is used; cards of one type compile the same": """
                HABANA_VISIBLE_DEVICES HABANA_VISIBLE_MODULES""",
            "how many recipes stay in memory": "HABANA_PGM_LRU_MAX",
            "where ranks run, and how they find each other": "HCCL_COMM_ID HCCL_SOCKET_IFNAME",
            "when the bridge is imported": "PT_HPU_AUTOLOAD TORCH_DEVICE_BACKEND_AUTOLOAD",
            "checked by the versions of the libraries": "HABANA_SOFTWARE_VERSION",
        }.items()
        for name in names.split()
    }
)
"""Variables that change no code, although their names begin like those that do, each with the reason."""

_PATH_VALUED = frozenset({"QUANT_CONFIG", "SYNAPSE_CONFIGURATION_FILE"})
_MAX_CONFIG_BYTES = 16 << 20
_LIST_VALUED = frozenset({"GC_KERNEL_PATH"})
CARD_VARIABLES = ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES")


@dataclass(frozen=True, slots=True)
class ProcessRules:
    """What a process must and must not have in its environment before it imports torch.

    Attributes:
        settings: Variable -> value.
        removed: Variable -> why it must not be set.
    """

    settings: Mapping[str, str]
    removed: Mapping[str, str]

    def applied(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns `inherited` with the settings, and without the removed variables."""
        kept = {name: value for name, value in inherited.items() if name not in self.removed}
        return {**kept, **self.settings}

    def changes(self, inherited: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the variables that are removed or set to something else, in order, each with the reason."""
        removed = {name: f"removed: {why}" for name, why in self.removed.items() if name in inherited}
        changed = {
            name: f"set to {value}"
            for name, value in self.settings.items()
            if inherited.get(name, value) != value
        }
        return dict(sorted({**removed, **changed}.items()))


RECIPE_RULES = ProcessRules(
    settings=MappingProxyType(
        {
            "PT_HPU_ENABLE_CACHE_METRICS": "1",  # K-12: counts each recipe; read at the import.
            "PT_HPU_PGM_ENABLE_CACHE": "1",
            "PT_HPU_COMPILE_GRAPH_FREEZE": "0",  # K-32: constants cannot be restored.
            "PT_HPU_ENABLE_JIT_GRAPH_NAME_HASH": "0",  # K-11: these two put a process's counters into keys.
            "PT_HPU_ENABLE_UNIQUE_GRAPH": "0",
            "HABANA_PGM_LRU_MAX": "100000",
        }
    ),
    removed=MappingProxyType(
        {
            **dict.fromkeys(
                ("PT_RECIPE_CACHE_PATH", "PT_CACHE_FOLDER_DELETE", "PT_CACHE_FOLDER_SIZE_MB"),
                "old names of the cache's setting",
            ),
            "PT_RECIPE_CACHE_IGNORE_VERSION": "leaves Synapse's version out of the names of recipes",
            "PT_COMPILE_ONLY_MODE": "leaves results unset, so nothing could be compared",
        }
    ),
)
"""The rules for every process whose recipes are sealed or restored, including vLLM's workers, in any mode."""

ENGINE_RULES = ProcessRules(
    settings=MappingProxyType(
        {
            **RECIPE_RULES.settings,
            "PT_HPU_AUTOLOAD": "1",
            "PT_HPU_LAZY_MODE": "0",  # Releases up to 1.19 are lazy if it is unset.
            "PT_HPU_KEEP_INPUT_MUTATIONS": "1",  # K-21: the KV cache is written in place.
            "PT_HPU_USE_EAGER_FALLBACK": "0",  # K-18: an operator that is not lowered is an error.
            "PT_HPU_WEIGHT_SHARING": "0",
            "PT_HPU_METRICS_GC_DETAILS": "1",  # Would make vLLM's workers synchronize after each step.
        }
    ),
    removed=MappingProxyType(
        {
            **RECIPE_RULES.removed,
            **dict.fromkeys(
                ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"), "one card, one process"
            ),
            "PT_HPU_INFERENCE_MODE": "appends the rank to the cache's directory",
            "PYTORCH_JIT": "switches off what graphs are lowered through",
            "TORCH_COMPILE_DISABLE": "switches the compiler off",
            "TORCHDYNAMO_DISABLE": "switches the compiler off",
        }
    ),
)
"""The rules for our own processes, which compile for one card or serve from it. Keys depend on some, so both need them."""

WITHOUT_BRIDGE: Mapping[str, str] = MappingProxyType(
    {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PT_HPU_AUTOLOAD": "0"}
)
"""For processes that trace: importing torch must not import the bridge (K-01)."""


def may_change_code(name: str) -> bool:
    """Returns whether a variable of this name is sealed."""
    return name not in NEUTRAL and _MAY_CHANGE_CODE.fullmatch(name) is not None


def sealed_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables that may change code, in order, with the values that are sealed.

    A variable that names files is sealed by their content: ``sha256:<hex>`` (for a list, of the digests in order).

    Raises:
        SpecError: such a file cannot be read.
    """
    names = sorted(name for name in environment if may_change_code(name))
    return {name: _sealed_value(name, environment[name]) for name in names}


def process_environment(
    inherited: Mapping[str, str],
    cache_directory: Path,
    module_id: int | None = None,
    rules: ProcessRules = ENGINE_RULES,
) -> dict[str, str]:
    """Returns the environment of a process that compiles into, or serves from, `cache_directory`.

    Args:
        inherited: What the process would have had.
        cache_directory: The directory of the recipes.
        module_id: The card to use; None: as inherited, or any free one. Both variables are set: with only the first one, the
            bridge would take another card if this one is busy (K-25).
        rules: What such a process must have.

    Raises:
        SpecError: the directory's path has a comma.
    """
    card = {} if module_id is None else dict.fromkeys(CARD_VARIABLES, str(module_id))
    return {**rules.applied(inherited), CACHE_VARIABLE: sealed_setting(cache_directory), **card}


def _sealed_value(name: str, value: str) -> str:
    if name == "QUANT_CONFIG" and value:
        return f"sha256:{_digest_of_calibration(Path(value))}"
    if name in _PATH_VALUED and value:
        return f"sha256:{_digest_of(name, Path(value))}"
    if name in _LIST_VALUED and value:
        digests = [_digest_of(name, Path(part)) for part in value.split(":") if part]
        return f"sha256:{sha256_bytes(' '.join(digests).encode())}"
    return value


def _digest_of_calibration(path: Path) -> str:
    """Returns the digest of a quantization's configuration and of the measurements that it names.

    ``dump_stats_path`` is the beginning of the measurements' paths (neural_compressor/torch/algorithms/fp8_quant). Their
    content counts, not their location. A configuration that names no measurements has the digest of its bytes.
    """
    digest = _digest_of("QUANT_CONFIG", path)
    try:
        said = json.loads(read_regular(path, _MAX_CONFIG_BYTES))
        start = said.pop("dump_stats_path")
        canonical = canonical_json(said)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SpecError):
        return digest
    if not isinstance(start, str):
        return digest
    folder, name = os.path.split(start)
    entries = sorted(one for one in _names_in(folder or ".") if one.startswith(name))
    measured = [
        f"{entry[len(name) :]} {_digest_of('QUANT_CONFIG', Path(folder, entry))}"
        for entry in entries
        if os.path.isfile(os.path.join(folder, entry))
    ]
    return sha256_bytes("\n".join([sha256_bytes(canonical), *measured]).encode("utf-8", "surrogateescape"))


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # Nothing has been measured yet.
        return []


def _digest_of(name: str, path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise SpecError(
            name, f"names {path}, which cannot be read: {error.strerror}", "an existing file"
        ) from error
