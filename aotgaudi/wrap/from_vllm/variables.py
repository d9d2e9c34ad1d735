"""What the variables that no spec takes do to what is warm; and how environment files are read.

From the lists of vllm_gaudi/extension/features.py and envs.py, vllm/envs.py and the bridge's env_flags.yaml. A variable
is harmless only with a reason; what is not known here may change what is warm.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from aotgaudi.errors import SpecError
from aotgaudi.wrap.values import Remark

_PARAMETERS = ("MIN", "STEP", "MAX", "LIMIT", "PAD_MAX", "PAD_PERCENT")
BOUND_VARIABLES = tuple(
    f"VLLM_{phase}_{dimension}_BUCKET_{parameter}"
    for phase, dimension, parameter in product(
        ("PROMPT", "DECODE"), ("BS", "QUERY", "SEQ", "CTX", "BLOCK"), _PARAMETERS
    )
)
"""Every such variable, those of no axis among them."""

_PREFIXES = ("VLLM_", "PT_HPU")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TAKEN = _names(
    """
    VLLM_BUCKETING_STRATEGY VLLM_EXPONENTIAL_BUCKETING VLLM_BUCKETING_FROM_FILE VLLM_ENABLE_BUCKETING
    VLLM_CONTIGUOUS_PA VLLM_PREFIX_CACHING VLLM_MERGED_PREFILL VLLM_UNIFIED_ATTN
    PT_HPU_SDPA_QKV_SLICE_MODE_FWD PT_HPU_SDPA_BC_FACTOR VLLM_FUSEDSDPA_SLIDE_THLD VLLM_DEFRAG
    VLLM_DEFRAG_THRESHOLD VLLM_DEFRAG_WITH_GRAPHS PT_HPU_LAZY_MODE VLLM_GRAPH_RESERVED_MEM
    VLLM_SKIP_WARMUP VLLM_MULTIMODAL_BUCKETS VLLM_MULTIMODAL_RESOLUTIONS VLLM_ALLOW_LONG_MAX_MODEL_LEN
    QUANT_CONFIG
    """
)
"""What a spec takes, besides the bounds of buckets (``vllm.bounds``)."""

_MAY_CHANGE: Mapping[str, str] = {
    "chooses the attention's code": """
        VLLM_ATTENTION_BACKEND VLLM_PROMPT_USE_FUSEDSDPA VLLM_PROMPT_USE_FLEX_ATTENTION VLLM_MLA_DISABLE
        VLLM_MLA_PERFORM_MATRIX_ABSORPTION VLLM_MLA_DISABLE_REQUANTIZATION VLLM_FUSEDSDPA_SLIDE_RIGHT
        VLLM_HPU_FSDPA_SLICE_ENABLED VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE
        VLLM_HPU_FSDPA_SLICE_WITH_GRAPH_BREAKS VLLM_ALIBI_USE_FLOAT32_BIASES VLLM_FP32_SOFTMAX
        VLLM_FP32_SOFTMAX_VISION VLLM_FUSED_BLOCK_SOFTMAX VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT
        VLLM_SOFTMAX_CONST_NORM VLLM_SOFTMAX_CONST_NORM_VALUE VLLM_USE_HPU_CONTIGUOUS_CACHE_FETCH
        VLLM_UNIFIED_ATTENTION_SHARED_CACHE_RATIO""",
    "changes how the model is computed": """
        VLLM_CONFIG_HIDDEN_LAYERS VLLM_HANDLE_TOPK_DUPLICATES VLLM_FLATTEN_INPUT VLLM_COS_SIN_RECOMPUTE
        VLLM_BATCH_INVARIANT VLLM_ROW_PARALLEL_CHUNKS VLLM_ROW_PARALLEL_CHUNK_THRESHOLD VLLM_MOE_CHUNK
        VLLM_MOE_TOKEN_BOUNDARY VLLM_FUSED_MOE_CHUNK_SIZE VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_COMPACT_GDN
        VLLM_GDN_COMPUTE_FP32 VLLM_GDN_EXACT_SOLVE VLLM_GDN_LEGACY_PHASE_B VLLM_USE_HYBRID_CACHE
        VLLM_USE_NAIVE_MAMBA_CACHE_SHARING VLLM_MAMBA_USE_PYTORCH VLLM_MAMBA_USE_SELECTIVE_STATE_UPDATE_REF_PT
        VLLM_MINIMAX_M3_MOE_TOKEN_TILE VLLM_MINIMAX_M3_MOE_DECODE_GATHER VLLM_MINIMAX_M3_MOE_GATHER_MAX_TOKENS
        VLLM_DISABLE_SHARED_EXPERTS_STREAM HPU_FUSED_MOE MAX_EXPERTS_PER_SLICE""",
    "changes how quantized layers are computed": """
        VLLM_DISABLE_MARK_SCALES_AS_CONST VLLM_HPU_FORCE_CHANNEL_FP8 VLLM_HPU_CONVERT_TO_FP8UZ VLLM_SCALE_ADJUSTMENT
        VLLM_DYNAMIC_KV_QUANT RUNTIME_SCALE_PATCHING HPU_ALIGNED_SCALE HPU_MXFP4_NATIVE""",
    "changes how graphs are compiled": """
        VLLM_T_COMPILE_REGIONAL_COMPILATION VLLM_REGIONAL_COMPILATION VLLM_T_COMPILE_FULLGRAPH
        VLLM_T_COMPILE_DYNAMIC_SHAPES VLLM_FULL_WARMUP VLLM_SKIP_MARK_UNBACKED VLLM_HPU_FORCE_MARK_STEP
        VLLM_ENABLE_EXPERIMENTAL_FLAGS EXPERIMENTAL_WEIGHT_SHARING FUSER_ENABLE_MULTI_THREADED_INVOCATIONS
        ENABLE_EXPERIMENTAL_FLAGS PT_HPUGRAPH_DISABLE_TENSOR_CACHE PT_COMPILE_ONLY_MODE GC_KERNEL_PATH""",
    "decides which shapes are captured as graphs": """
        VLLM_GRAPH_PROMPT_RATIO VLLM_GRAPH_PROMPT_STRATEGY VLLM_GRAPH_DECODE_STRATEGY""",
    "names several models for one process: a spec describes one": "VLLM_HPU_MULTI_MODEL_CONFIG",
    "chooses the engine or its plugins": "VLLM_USE_V1 VLLM_PLUGINS VLLM_USE_FAKE_HPU VLLM_DEVELOPER_MODE",
    "the model runner prepares its inputs in another way": """
        VLLM_DELAYED_SAMPLING VLLM_HPU_USE_DELAYED_SAMPLING""",
    "decides which layers and experts a rank has": "VLLM_PP_LAYER_PARTITION VLLM_ENABLE_EXPERT_PARALLEL",
    "takes the model from elsewhere: give its config.json with --model-config": """
        VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH""",
    "warms up the vision tower in another way": "VLLM_MM_WARMUP_OUTSIDE_COMPILE_ONLY",
    "transfers between servers add steps of theirs": """
        VLLM_KV_TRANSFER_CONFIG VLLM_KV_CONNECTOR VLLM_HPU_HETERO_KV_LAYOUT VLLM_HPU_NIXL_JOINT_KV
        VLLM_HPU_NIXL_STAGING_SLOTS VLLM_NIXL_DEVICE_TO_DEVICE""",
    "data parallelism is not enumerated": "VLLM_DP_SIZE VLLM_DP_RANK VLLM_ALL2ALL_BACKEND",
}
_BRIDGE = "the bridge compiles other code"
_BRIDGE_NAMES = _names(
    """
    COMPILE_USE_RECIPES COMPILE_DECOMPOSITION_MODE KEEP_INPUT_MUTATIONS USE_EAGER_FALLBACK
    COMPILE_GRAPH_FREEZE COMPILE_DISCARD_FROZEN_PARAMS COMPILE_REMOVE_UNNECESSARY_CLONES
    USE_INPLACE_COLLECTIVE USE_INPLACE_INDEX_COPY USE_INFERENCE_COMPILER ENABLE_SFG USE_CPP_PARTITIONER
    ENABLE_ALLREDUCE_GRAPH_SPLIT FORCE_STATIC_COMPILE REINPLACE_ADD REASSIGN_FULL_COPY USE_BOXED_INPUT
    LAZY_ACC_PAR_MODE LAZY_ACC_VIEW_OPS_MODE MAX_COMPOUND_OP_SIZE MAX_COMPOUND_OP_SIZE_SS
    MAX_COMPOUND_OP_SYNC ENABLE_STAGE_SUBMISSION STAGE_SUBMISSION_MODE ENABLE_LAZY_COLLECTIVES
    INFERENCE_MODE INFERENCE_SYNAPSE_DATA_TYPE_SELECTION INFERENCE_STORAGE_OVERRIDE
    ENABLE_PERMUTE_WITH_STRIDED_VIEW ENABLE_SYNAPSE_OUTPUT_PERMUTE ENABLE_SYNAPSE_INPUT_REUSE
    ENABLE_WEIGHT_CPU_PERMUTE ENABLE_WEIGHT_HPU_PERMUTE MAX_PERMUTE_THRESHOLD ENABLE_SLICE_INSERT
    MATMUL3D_2D_RESHAPE OVERRIDE_LINEAR_MATMUL_EAGER ENABLE_DIV_PRECISE FORCE_TANH_FOR_GELU
    DISABLE_INSTANCE_NORM USE_UNSORTED_SCATTER_ADD SORT_INDEX_IN_SCATTER_ADD ENABLE_NEGATIVE_INDEXING
    FORCE_INDEX_PUT_FRONTEND_FALLBACK EAGER_INDEX_PUT_BOOL_OPTIMIZED STOCHASTIC_ROUNDING_MODE
    WRAP_RANDOM_OPS_COMPILE USE_PHILOX_NORMAL PLACE_ON_CPU CHECK_NUM_CONSTS USE_JIT_FORK
    ENABLE_UNIQUE_GRAPH ENABLE_GRAPH_RUNNING_HASH ENABLE_JIT_GRAPH_NAME_HASH ENABLE_DEBUG_NAMES
    ENABLE_REFINE_DYNAMIC_SHAPES DYNAMIC_MIN_POLICY_ORDER DYNAMIC_MAX_POLICY_ORDER
    ENABLE_DYNAMIC_PASS_FALLBACK ENABLE_MIN_MAX_AS_CURRENT OPTIM_DYNAMIC_OUTPUT_SIF
    ENABLE_FAST_SHAPE_INFERENCE RUN_HYBRID_SIF ENABLE_BROADCAST_BUCKET_HANDLING ENABLE_ZERO_MIN
    ENABLE_DYNAMIC_OUTPUT_PREALLOCATE ENABLE_DISK_CACHE_FOR_DSD ENABLE_EAGER_CACHE ENABLE_EAGER_COMPILER
    EAGER_SHAPE_AGNOSTIC_GRAPH EAGER_VIEW_HANDLING WEIGHT_SHARING H2D_TRIVIAL_SCALES_MODE PGM_ENABLE_CACHE
    AUTOLOAD BLOCK_SIZE_FACTOR ENABLE_RESTORE_KV_LAYOUT
    """
)
"""Without ``PT_HPU_``."""

_HARMLESS: Mapping[str, str] = {
    "where and how the server listens": """
        VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_RPC_BASE_PATH VLLM_RPC_TIMEOUT VLLM_HTTP_TIMEOUT_KEEP_ALIVE
        VLLM_API_KEY VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_SERVER_DEV_MODE VLLM_SLEEP_WHEN_IDLE
        VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_NIXL_ABORT_REQUEST_TIMEOUT""",
    "logs, metrics and traces": """
        VLLM_CONFIGURE_LOGGING VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_CONFIG_PATH VLLM_TRACE_FUNCTION
        VLLM_DEBUG VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_LOG_BATCHSIZE_INTERVAL VLLM_RINGBUFFER_WARNING_INTERVAL
        VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_NO_DEPRECATION_WARNING
        VLLM_PROFILER_ENABLED VLLM_TORCH_PROFILER_DIR VLLM_PT_PROFILE VLLM_PROFILE_PROMPT VLLM_PROFILE_DECODE
        VLLM_PROFILE_STEPS VLLM_PROFILE_UNIFIED PT_HPU_METRICS_GC_DETAILS PT_HPU_METRICS_FILE
        PT_HPU_METRICS_FILE_FORMAT PT_HPU_METRICS_DUMP_TRIGGERS PT_HPU_ENABLE_CACHE_METRICS
        VLLM_HPU_LOG_STEP_GRAPH_COMPILATION VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL VLLM_HPU_LOG_STEP_CPU_FALLBACKS
        VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL""",
    "where files are kept": """
        VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_XGRAMMAR_CACHE_MB PT_HPU_RECIPE_CACHE_CONFIG
        VLLM_LORA_RESOLVER_CACHE_DIR""",
    "how requests are read and answered": """
        VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_VIDEO_LOADER_BACKEND
        VLLM_MM_INPUT_CACHE_GIB VLLM_MM_INPUT_CACHE_SIZE VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
        VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_DETOKENIZE_ON_OPENAI_SERVER VLLM_MSGPACK_ZERO_COPY_THRESHOLD
        VLLM_V0_USE_OUTLINES_CACHE VLLM_V1_USE_OUTLINES_CACHE VLLM_LOGITS_PROCESSOR_THREADS""",
    "how processes are started and speak to each other": """
        VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_ITERATION_TIMEOUT_S
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_ALLOW_INSECURE_SERIALIZATION
        VLLM_USE_RAY_SPMD_WORKER VLLM_USE_RAY_COMPILED_DAG VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
        VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES
        VLLM_WEIGHT_LOAD_FORCE_SYNC VLLM_GC_THR_MULTIPLIER VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT
        VLLM_HPU_NIXL_FORCE_UCX_TCP""",
    "counts when vLLM itself is built": """
        VLLM_TARGET_DEVICE VLLM_USE_PRECOMPILED VLLM_PRECOMPILED_WHEEL_LOCATION
        VLLM_TEST_USE_PRECOMPILED_NIGHTLY_WHEEL""",
    "of other devices": """
        VLLM_NCCL_SO_PATH VLLM_CUDART_SO_PATH VLLM_SKIP_P2P_CHECK VLLM_USE_TRITON_FLASH_ATTN VLLM_USE_TRITON_AWQ
        VLLM_FLASH_ATTN_VERSION VLLM_MARLIN_USE_ATOMIC_ADD""",
    "which adapters fill the slots": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
}
_OTHER_DEVICES = re.compile(r"VLLM_(ROCM|CPU|XLA|TPU|OPENVINO|NEURON|FLASHINFER|USE_FLASHINFER|CUDA)_.*")
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_KUBERNETES = re.compile(r"VLLM_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP)(_.*)?)")
"""What Kubernetes sets in every container for a service whose name begins with ``vllm``."""


def _by_name(table: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for reason, names in table.items():
        yield from ((name, reason) for name in names.split())


_CHANGES = {**dict(_by_name(_MAY_CHANGE)), **{f"PT_HPU_{name}": _BRIDGE for name in _BRIDGE_NAMES}}
_CHANGES_NOTHING = dict(_by_name(_HARMLESS))
_KNOWN = frozenset((*TAKEN, *BOUND_VARIABLES, *_CHANGES, *_CHANGES_NOTHING))


def is_looked_at(name: str) -> bool:
    """Whether a variable is vLLM's or the bridge's; the environment has others, which are left alone."""
    return name.startswith(_PREFIXES) or name in _KNOWN


@dataclass(frozen=True, slots=True)
class OtherVariables:
    """Variables that a spec has no place for, in alphabetical order, each with what it does."""

    unknown: tuple[Remark, ...]
    harmless: tuple[Remark, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> OtherVariables:
        """Sorts names into those that may change what is warm and those that do not."""
        ordered = sorted(names)
        reasons = {name: _why_harmless(name) for name in ordered}
        return cls(
            tuple(Remark(name, _why_unknown(name)) for name, reason in reasons.items() if reason is None),
            tuple(Remark(name, reason) for name, reason in reasons.items() if reason is not None),
        )


def _why_harmless(name: str) -> str | None:
    if _OTHER_DEVICES.fullmatch(name):
        return "of other devices"
    if _KUBERNETES.fullmatch(name):
        return "set by Kubernetes for a service"
    return _CHANGES_NOTHING.get(name)


def _why_unknown(name: str) -> str:
    if name in _CHANGES:
        return f"{_CHANGES[name]}: set it alike where graphs are built and where they run"
    close = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.8)
    return f"not known: did you mean {close[0]}?" if close else "not known"


def parse_env_file(text: str, where: str) -> dict[str, str]:
    """Returns the variables of an environment file's text, as docker and shells have them; the last of a name counts.

    Blank lines and lines that begin with ``#`` are skipped, ``export`` is allowed, quotes are taken off, and a
    ``#`` after a space begins a comment. Nothing is expanded; of variables that are not vLLM's or the bridge's
    the text is left as it stands.

    Raises:
        SpecError: a line of another form, with its number.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None:
            raise SpecError(f"{where}:{number}", "is no assignment", "NAME=VALUE")
        name, value = match.groups()
        found[name] = _unquoted(value, f"{where}:{number}") if is_looked_at(name) else value
    return found


def _unquoted(text: str, where: str) -> str:
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise SpecError(where, str(error).lower(), "a value without quotes, or between two") from error
    value = " ".join(words)
    if re.search(r"\$(\w|\{)", value) and not text.startswith("'"):
        raise SpecError(where, f"has {value!r}, which a shell would expand", "the value itself")
    return value
