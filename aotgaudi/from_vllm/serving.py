"""Everything but buckets and limits: mode, defragmenter, vision, speculation, devices, quantization, adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aotgaudi.bucketing.bucket_file import DYNAMIC_SHAPES_VARIABLE
from aotgaudi.bucketing.versions import EnvironmentRules, find_version
from aotgaudi.commands.words import parse_fraction, parse_integer, parse_table
from aotgaudi.errors import SpecError, shown
from aotgaudi.from_vllm.buckets import DEFRAG_VARIABLES, BucketingEnvironment
from aotgaudi.from_vllm.command import VariableReader, VllmCommand
from aotgaudi.from_vllm.model import DTYPES, release_numbers
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.spec.scheduler import DefragSpec
from aotgaudi.spec.target import ExecutionMode
from aotgaudi.spec.vision import MOST_IMAGES

LAZY_VARIABLE = "PT_HPU_LAZY_MODE"
LONG_VARIABLE = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
QUANTIZATION_VARIABLE = "QUANT_CONFIG"
RESERVED_VARIABLE = "VLLM_GRAPH_RESERVED_MEM"
DEFAULT_RESERVED = 0.1
"""The share of usable memory that is kept for graphs (vllm_gaudi/v1/worker/hpu_worker.py 407)."""

_MOST_SPECULATIVE_TOKENS = 1024
_IMAGES_FLAG = "limit-mm-per-prompt"
_PAIRS = re.compile(r"\w+=\d+(,\w+=\d+)*")

_CONNECTORS = {
    "NixlConnector": (0, 11),
    "LMCacheConnectorV1": (0, 13),
    "OffloadingConnector": (0, 16),
    "MultiConnector": (0, 16),
}
"""The connectors whose steps are known, and since which version (v1/worker/hpu_model_runner.py
``_get_prompts_and_decodes`` tells their requests apart)."""

MODES: Mapping[tuple[bool, bool], ExecutionMode] = {
    (True, False): "hpu_graphs",
    (True, True): "lazy",
    (False, False): "torch_compile",
    (False, True): "eager",
}
"""The execution mode by ``(PT_HPU_LAZY_MODE is 1, --enforce-eager)``."""

MODE_NOTES: Mapping[ExecutionMode, str] = {
    "hpu_graphs": "hpu_graphs: every shape's recipes and captured graph must be warm; captures are made anew by"
    " every process",
    "lazy": "lazy: every shape's recipes must be warm; upstream warms up nothing with --enforce-eager, and"
    " compiles on first use",
    "torch_compile": "torch_compile: every shape's recipes and compiled code must be warm; tracing is repeated by"
    " every process",
    "eager": "eager: nothing is compiled by shape, so that nothing must be warm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEnvironment:
    """What an environment says about anything but buckets.

    Attributes:
        is_lazy: PT_HPU_LAZY_MODE; None if it is unset, which means 0 (README_GAUDI.md of vllm-fork's releases for
            Gaudi 1.21 and 1.22; docs/configuration/env_variables.md of vllm-gaudi).
        skips_warmup: VLLM_SKIP_WARMUP.
        reserved: VLLM_GRAPH_RESERVED_MEM; None if it is unset.
        vision_buckets, vision_resolutions: as in ``spec.vision.VisionSpec``. The text ``None`` for the buckets is an
            empty tuple here, an unset variable None.
        allows_long: VLLM_ALLOW_LONG_MAX_MODEL_LEN.
        static_shapes: whether VLLM_T_COMPILE_DYNAMIC_SHAPES is false.
        quant_config: the path in QUANT_CONFIG; None if it is unset.
        read: the variables that were read.
        notes: as in ``BucketingEnvironment``.
    """

    is_lazy: bool | None
    skips_warmup: bool
    defrag: bool | None
    defrag_threshold: int | None
    defrag_with_graphs: bool | None
    reserved: float | None
    vision_buckets: tuple[int, ...] | None
    vision_resolutions: tuple[str, ...]
    allows_long: bool
    static_shapes: bool
    quant_config: str | None
    read: frozenset[str]
    notes: tuple[str, ...]

    @classmethod
    def parse(cls, environment: Mapping[str, str], version: str) -> ServingEnvironment:
        """Reads the environment as `version` does. Raises SpecError, naming the variable."""
        reader = VariableReader(environment)
        reserved = reader.text(RESERVED_VARIABLE)
        defrag, threshold, with_graphs = _defrag(reader, find_version(version).environment)
        return cls(
            is_lazy=_lazy(reader),
            skips_warmup=bool(reader.boolean("VLLM_SKIP_WARMUP")),
            defrag=defrag,
            defrag_threshold=threshold,
            defrag_with_graphs=with_graphs,
            reserved=None
            if reserved is None
            else parse_fraction(RESERVED_VARIABLE, reserved, includes_zero=True, includes_one=False),
            vision_buckets=_vision_buckets(reader),
            vision_resolutions=_resolutions(reader),
            allows_long=(reader.text(LONG_VARIABLE) or "").strip().lower() in ("1", "true"),
            static_shapes=reader.boolean(DYNAMIC_SHAPES_VARIABLE) is False,
            quant_config=reader.text(QUANTIZATION_VARIABLE),
            read=reader.read,
            notes=reader.notes,
        )

    def defrag_spec(self, bucketing: BucketingEnvironment) -> DefragSpec:
        """Returns the defragmenter's settings in this environment.

        If VLLM_DEFRAG is unset, the defragmenter is on with unified attention (v0.11.2 to v0.17.1) or with contiguous paged
        attention (from v0.19.0 on; extension/features.py), and its swaps are graphs under torch.compile
        (extension/defragmentation.py 61).
        """
        by_default = {"contiguous_pa": bucketing.contiguous_pa, "unified": bucketing.unified}
        rule = find_version(bucketing.version).environment.defrag
        enabled = by_default.get(rule or "", False) if self.defrag is None else self.defrag
        with_graphs = not self.is_lazy if self.defrag_with_graphs is None else self.defrag_with_graphs
        spec = DefragSpec(enabled=enabled, with_graphs=with_graphs)
        threshold = {} if self.defrag_threshold is None else {"threshold": self.defrag_threshold}
        return spec.model_copy(update=threshold)


def _defrag(reader: VariableReader, rules: EnvironmentRules) -> tuple[bool | None, int | None, bool | None]:
    """Returns whether the defragmenter is on, its threshold, and whether its swaps are graphs."""
    if rules.defrag is None:
        return False, None, None
    enabled, threshold, with_graphs = DEFRAG_VARIABLES
    most = reader.integer(threshold)
    within = None if most is None else min(max(most, 1), LARGEST_LIMIT)
    return reader.boolean(enabled), within, reader.boolean(with_graphs)


def _lazy(reader: VariableReader) -> bool | None:
    text = reader.text(LAZY_VARIABLE)
    if text is None:
        return None
    if text.strip() not in ("0", "1"):
        raise SpecError(
            LAZY_VARIABLE, f"is {shown(text)}", "0 or 1 (the bridge takes all but 0 for lazy, false included)"
        )
    return text.strip() == "1"


def _vision_buckets(reader: VariableReader) -> tuple[int, ...] | None:
    name = "VLLM_MULTIMODAL_BUCKETS"
    text = reader.text(name)
    if not text:
        return None
    if text == "None":
        return ()
    return tuple(parse_integer(name, item, minimum=1) for item in text.split(","))


def _resolutions(reader: VariableReader) -> tuple[str, ...]:
    text = reader.text("VLLM_MULTIMODAL_RESOLUTIONS") or ""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def parallel_table(
    command: VllmCommand, release: str, *, has_experts: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the keys of ``spec.build_spec.ParallelSpec`` that a command gives, and notes on replicas. Raises SpecError.

    Experts are those of ``_verify_with_expert_parallelism`` in vllm/config/model.py. From 0.14 on replicas of models
    without experts are independent (``run_engine_core`` in vllm/v1/engine/core.py). The plugin pads steps among replicas
    from v0.11.2 on.
    """
    flags = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
    table: dict[str, Any] = {
        name.replace("-", "_"): parse_integer(f"--{name}", command.values[name], minimum=1)
        for name in flags
        if name in command.values
    }
    expert_parallel = command.switches.get("enable-expert-parallel", False)
    if expert_parallel and not has_experts:
        problem = f"is given, but the model has no experts: vLLM {release} does not start with that"
        raise SpecError("--enable-expert-parallel", problem, "leave it out")
    size, note = table.get("data_parallel_size", 1), ""
    if size > 1 and release_numbers(release) < (0, 11):
        problem = f"is {size}, and this version does not say how replicas step together"
        raise SpecError("--data-parallel-size", problem, "describe one replica")
    if size > 1 and release_numbers(release) >= (0, 14) and not has_experts:
        del table["data_parallel_size"]
        what = "a server of its own, and runs the same entries"
        note = f"{size} replicas of a model without experts: each is {what}"
    elif size > 1:
        note = f"{size} replicas in lockstep: each pads its steps to those of the others"
    return {**table, "expert_parallel": expert_parallel}, (note,) if note else ()


def has_kv_transfer(command: VllmCommand, release: str) -> bool:
    """Returns whether --kv-transfer-config lets KV blocks come from elsewhere. Raises SpecError for unknown steps."""
    flag = "kv-transfer-config"
    table = parse_table(flag, command.values.get(flag, "{}"))
    role, is_on = table.get("kv_role"), table.get("kv_connector") is not None
    if role not in ("kv_producer", "kv_consumer", "kv_both") and (is_on or role is not None):
        problem = f"is {shown(str(role))}: vLLM does not start with that"
        raise SpecError(f"--{flag} kv_role", problem, "kv_producer, kv_consumer or kv_both")
    if not is_on:
        return False
    known = [name for name, since in _CONNECTORS.items() if since <= release_numbers(release)]
    connectors: list[Any] = [table]
    if table["kv_connector"] == "MultiConnector":
        extra = table.get("kv_connector_extra_config")
        parts = extra.get("connectors") if isinstance(extra, dict) else None
        connectors += parts if isinstance(parts, list) else [{}]
    for one in connectors:
        name = one.get("kv_connector") if isinstance(one, dict) else None
        is_known = name in known and (one is table or name != "MultiConnector")
        if not is_known or one.get("kv_connector_module_path") is not None:
            remedy = f"one of {', '.join(known)}" if known else "a version of the plugin from v0.11.2 on"
            problem = f"is {shown(str(name))}, whose steps are not known in this version"
            raise SpecError(f"--{flag} kv_connector", problem, remedy)
    return True


def lora_table(command: VllmCommand, rules: EnvironmentRules) -> dict[str, Any] | None:
    """Returns the keys of ``spec.lora.LoraSpec``; None for a server without adapters. Raises SpecError."""
    if not command.switches.get("enable-lora", False):
        return None
    flags = {"max-loras": "max_loras", "max-lora-rank": "max_lora_rank"}
    if rules.lora_extra_vocab_size:
        flags["lora-extra-vocab-size"] = "extra_vocab_size"
    given = {
        key: parse_integer(f"--{flag}", command.values[flag])
        for flag, key in flags.items()
        if flag in command.values
    }
    dtype = command.values.get("lora-dtype", "auto")
    return {
        "extra_vocab_size": rules.lora_extra_vocab_size,
        "dtype": DTYPES.get(dtype, dtype),
        "fully_sharded": command.switches.get("fully-sharded-loras", False),
        **given,
    }


def quantization_table(
    command: VllmCommand, serving: ServingEnvironment, digest_file: Callable[[str], str]
) -> dict[str, Any] | None:
    """Returns the keys of ``spec.quantization.QuantizationSpec``; None if the command quantizes nothing.

    QUANT_CONFIG alone turns Intel Neural Compressor on (vllm_gaudi/utils.py ``is_inc_quantization``, and vllm-fork's
    vllm/worker/hpu_model_runner.py ``_is_quant_with_inc``). Raises what `digest_file` raises.
    """
    method = command.values.get("quantization")
    method = None if method in ("None", "none", "") else method
    kv_cache_dtype = command.values.get("kv-cache-dtype", "auto")
    kv_cache_dtype = "auto" if kv_cache_dtype == "bfloat16" else kv_cache_dtype
    if serving.quant_config is None and method is None and kv_cache_dtype == "auto":
        return None
    digest = None if serving.quant_config is None else digest_file(serving.quant_config)
    return {
        "method": method or ("inc" if digest else None),
        "kv_cache_dtype": kv_cache_dtype,
        "config_sha256": digest,
    }


def num_speculative_tokens(values: Mapping[str, str]) -> int:
    """Returns the number of speculative tokens per step: --speculative-config, else --num-speculative-tokens, else 0."""
    text = values.get("speculative-config")
    if text is None:
        older = values.get("num-speculative-tokens", "0")
        return parse_integer("--num-speculative-tokens", older, maximum=_MOST_SPECULATIVE_TOKENS)
    count = parse_table("speculative-config", text).get("num_speculative_tokens")
    where = "--speculative-config num_speculative_tokens"
    if count is None:
        raise SpecError(where, "is missing", "give it: otherwise the draft model's own config decides")
    if isinstance(count, bool) or not isinstance(count, int):
        raise SpecError(where, f"is {count!r}", f"an integer from 1 to {_MOST_SPECULATIVE_TOKENS}")
    return parse_integer(where, str(count), minimum=1, maximum=_MOST_SPECULATIVE_TOKENS)


def max_logprobs(values: Mapping[str, str]) -> int | None:
    """Returns --max-logprobs; None if it is not given."""
    text = values.get("max-logprobs")
    if text is None:
        return None
    return -1 if text.strip() == "-1" else parse_integer("--max-logprobs", text)


def most_images(command: VllmCommand) -> int:
    """Returns how many images or videos a prompt may hold, as upstream warms them up. The default is 1.

    Returns 0 if both are limited to 0, and with --language-model-only. The flag is JSON, or ``image=4,video=0`` in older
    releases. A limit of images takes precedence over one of videos (hpu_model_runner.py 5963-5995). Raises SpecError.
    """
    if command.switches.get("language-model-only", False):
        return 0
    text = command.values.get(_IMAGES_FLAG)
    if text is None:
        return 1
    if _PAIRS.fullmatch(text):
        pairs = (pair.split("=") for pair in text.split(","))
        limits: dict[str, Any] = {name: parse_integer(f"--{_IMAGES_FLAG}", count) for name, count in pairs}
    else:
        limits = parse_table(_IMAGES_FLAG, text)
    image, video = (_limit(limits.get(kind, 1)) for kind in ("image", "video"))
    return image or video


def _limit(value: Any) -> int:
    count = value.get("count", 1) if isinstance(value, dict) else value
    if type(count) is not int or not 0 <= count <= MOST_IMAGES:
        raise SpecError(
            f"--{_IMAGES_FLAG}", f"has {shown(str(count))}", f"0 to {MOST_IMAGES:,} items a prompt"
        )
    return count
