"""The flags and variables of vLLM: their effect on the shapes that a server warms up, and on the code that it compiles.

Two readers share this table. ``--from-vllm`` (`from_vllm`) asks about shapes: does a spec take the flag, refuse it, or
may it leave the flag out? The launch key (`wrap.adapters.vllm`) asks about code: does the flag count? A flag that is in no
list counts for the key, and ``--from-vllm`` refuses it. When vLLM gains a flag, this is the only module to change.

A flag counts unless the table says why it is neutral: its value reaches no graph, and vLLM's own hash (``compute_hash`` of
vllm/config/*.py, release 0.32) does not contain it. A variable is neutral if ``compile_factors`` of vllm/envs.py also
ignores it. A variable that changes no code but is in that hash is a condition. Neutral values and conditions have no effect
on shapes. The reverse is not true: `compilation-config` leaves the shapes alone and changes the code.

A name says how many words its flag takes, in getopt's notation: ``enable-lora`` is a switch and has a ``--no-`` form,
``port=`` takes one word, ``api-key=*`` takes all words up to the next flag.

Sources: vllm/engine/arg_utils.py and vllm/entrypoints/openai/cli_args.py (vllm/entrypoints/launchers/cli_args.py in 0.32),
vllm-fork's additions to them, vllm/envs.py, vllm_gaudi/extension/features.py and envs.py, the bridge's env_flags.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Literal, TypeVar

from pydantic import JsonValue

from aotgaudi.commands.variables import Hashed, by_name
from aotgaudi.commands.words import Arity

Effect = Literal["taken", "refused", "harmless", "unknown", "unread"]
"""The effect of a flag or a variable on shapes. ``taken``: a spec has a field for it. ``refused``: a spec cannot express it.
``harmless``: no effect. ``unknown``: it may change what is warm, and no spec has a field for it. ``unread``: a flag of a
release that no plugin for Gaudi builds on, so ``--from-vllm`` does not know it."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: without dashes.
        arity: how many words it takes.
        effect: its effect on shapes.
        reason: why it has that effect; for a flag that a spec takes, the spec's field.
        no_op: values with which a refused flag changes nothing, beside its default.
        is_neutral: whether it changes no code.
    """

    name: str
    arity: Arity
    effect: Effect
    reason: str = ""
    no_op: tuple[str, ...] = ()
    is_neutral: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """The effect of a variable on shapes, and the reason. The reason is empty if a spec takes the variable."""

    effect: Effect
    reason: str = ""


_Row = TypeVar("_Row")

_TAKEN: Mapping[str, str] = {
    "model.config": "revision= hf-overrides= rope-scaling= rope-theta=",
    "model.dtype": "dtype=",
    "model.quantization.method": "quantization=",
    "model.quantization.kv_cache_dtype": "kv-cache-dtype=",
    "limits.max_num_seqs": "max-num-seqs=",
    "limits.max_num_prefill_seqs": "max-num-prefill-seqs=",
    "limits.max_num_batched_tokens": "max-num-batched-tokens= performance-mode=",
    "limits.max_model_len": "max-model-len=",
    "limits.block_size": "block-size=",
    "limits.num_blocks": "num-gpu-blocks-override= gpu-memory-utilization=",
    "scheduler.chunked_prefill": "enable-chunked-prefill",
    "scheduler.max_logprobs": "max-logprobs=",
    "scheduler.kv_transfer": "kv-transfer-config=",
    "parallel.tensor_parallel_size": "tensor-parallel-size=",
    "parallel.pipeline_parallel_size": "pipeline-parallel-size=",
    "parallel.expert_parallel": "enable-expert-parallel",
    "parallel.data_parallel_size": "data-parallel-size=",
    "lora": "enable-lora",
    "lora.max_loras": "max-loras=",
    "lora.max_lora_rank": "max-lora-rank=",
    "lora.dtype": "lora-dtype=",
    "lora.fully_sharded": "fully-sharded-loras",
    "lora.extra_vocab_size": "lora-extra-vocab-size=",
    "bucketing.prefix_caching": "enable-prefix-caching",
    "bucketing.num_speculative_tokens": "speculative-config= num-speculative-tokens=",
    "vision.enabled": "language-model-only",
    "vision.max_images": "limit-mm-per-prompt=",
    "target.execution_mode": "enforce-eager",
}
"""Field of a spec -> the flags that it takes. They count."""

_TAKEN_NEUTRAL: Mapping[str, str] = {"model.config": "model=", "model.name": "served-model-name=*"}
"""Field of a spec -> flags that name the model. In the key, the model counts by the content of its files."""

_DEFAULTS: Mapping[str, str] = {
    "1": """
        tensor-parallel-size pipeline-parallel-size data-parallel-size nnodes decode-context-parallel-size
        prefill-context-parallel-size""",
    "auto": """
        dtype kv-cache-dtype load-format model-impl config-format runner convert generation-config tokenizer-mode""",
    "2": "optimization-level",
    "0": "cpu-offload-gb",
}
_OFF = "enforce-eager trust-remote-code enable-lora enable-expert-parallel"

DEFAULTS: Mapping[str, JsonValue] = MappingProxyType(
    {**dict.fromkeys(_OFF.split(), False), **dict(by_name(_DEFAULTS))}
)
"""The defaults of flags in vLLM 0.32 (vllm/config/*.py, vllm/engine/arg_utils.py). A flag at its default does not count."""

BLOCK_SIZE = 128
"""The default of ``--block-size`` on a CPU (vllm/platforms/cpu.py) and on Gaudi (vllm_gaudi/platform.py 152-156)."""

UTILIZATION = 0.9
"""The default of ``--gpu-memory-utilization`` (vllm/config/cache.py; vllm-gaudi: docs/configuration/warm-up/warm-up.md)."""

CPU_DEFAULTS: Mapping[str, JsonValue] = MappingProxyType({**DEFAULTS, "block-size": str(BLOCK_SIZE)})
"""The defaults of flags on a CPU."""

GAUDI_DEFAULTS: Mapping[str, int] = MappingProxyType(
    {"max-num-seqs": 256, "max-num-batched-tokens": 2048, "block-size": BLOCK_SIZE}
)
"""The defaults of limits on Gaudi, which ``--from-vllm`` writes into a spec. In a launch's key these flags count.

vLLM has these for a server on a device whose memory it does not know (vllm/engine/arg_utils.py ``get_batch_defaults``), and
Gaudi's platform reports 0 bytes to get them (vllm_gaudi/platform.py ``get_device_total_memory``).
"""

_REFUSED: Mapping[str, str] = {
    "the steps or graphs that it adds are not enumerated": """
        decode-context-parallel-size= prefill-context-parallel-size= enable-eplb enable-dbo enable-tower-connector-lora
        default-mm-loras= split-qkv""",
    "an encoder of its own adds steps of its own": "ec-transfer-config=",
    "multi-step scheduling adds steps of its own": "num-scheduler-steps=",
    "pooling models have no decode steps; only text generation is enumerated": "task= runner= convert=",
    "give the changed config.json with --model-config instead": "hf-config-path= disable-sliding-window",
    "a spec of a vLLM command is for Gaudi": "device=",
    "offloaded weights change the graphs": "cpu-offload-gb=",
}
"""Why a spec refuses flags -> these flags. They count."""

_NO_OP: Mapping[str, tuple[str, ...]] = {
    "num-scheduler-steps": ("0", "1"),
    "task": ("auto", "generate"),
    "runner": ("generate",),
    "convert": ("none",),
    "device": ("hpu", "auto"),
    "cpu-offload-gb": ("0.0",),
}
"""Refused flags -> the values with which they change nothing, beside their defaults."""

_NOT_WRAPPED: Mapping[str, str] = {
    "ranks on other machines cannot be watched from here": "headless",
    "somebody else chooses each request's rank, and not all ranks are of this server: let vLLM balance the load": """
        data-parallel-rank data-parallel-start-rank data-parallel-hybrid-lb data-parallel-external-lb
        data-parallel-multi-port-external-lb""",
    "ranks come and go while it serves, so it is not known which must be watched": "enable-elastic-ep",
    "SGLang's file is not read: give its flags on the command line": "config",
    "Ray's processes cannot be watched from here": "use-ray",
    "it is not asked over HTTP, so the exercise cannot be sent": "grpc smg-grpc-mode grpc-mode",
    "it answers no completions": "encoder-only",
}
NOT_WRAPPED: Mapping[str, str] = MappingProxyType(dict(by_name(_NOT_WRAPPED)))
"""Flags of vLLM and SGLang with which a server cannot be wrapped, each with the reason."""

NEUTRAL_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"kv-transfer-config": frozenset({"engine_id", "kv_ip", "kv_port"})}
)
"""Flags that count -> keys of their tables, at any depth, that do not: who an instance is, and where. vLLM's hash has
nothing of this flag (``KVTransferConfig.compute_hash`` in vllm/config/kv_transfer.py)."""

_MAY_CHANGE: Mapping[str, str] = {
    "chooses the attention's code": "attention-backend= attention-config= mm-encoder-attn-backend= disable-cascade-attn",
    "decides how tokens reach their experts": "all2all-backend= expert-placement-strategy=",
    "chooses how graphs are compiled": "compilation-config= optimization-level=",
    "chooses the model's code": "model-impl= trust-remote-code config-format= kv-sharing-fast-prefill",
    "is part of the code of recurrent layers": "mamba-cache-dtype= mamba-ssm-cache-dtype=",
    "decides the shape of recurrent states": "mamba-block-size= mamba-cache-mode=",
    "lets prompts be embeddings, whose steps have other inputs": "enable-prompt-embeds enable-mm-embeds",
    "scales are computed in steps that are not enumerated": "calculate-kv-scales",
    "some formats bring a quantization of their own": "load-format= allow-deprecated-quantization",
    "decides how many KV blocks a server counts for itself": "kv-cache-memory-bytes=",
    "copies KV blocks to the host and back": "swap-space= preemption-mode= kv-offloading-size= kv-offloading-backend=",
    "decides the sizes that images and videos are computed in": """
        mm-processor-kwargs= video-pruning-rate= mm-encoder-tp-mode= mm-encoder-only media-io-kwargs=""",
    "layers may share KV blocks otherwise": "disable-hybrid-kv-cache-manager",
    "replaces code of the server": """
        worker-cls= worker-extension-cls= scheduler-cls= logits-processors=* logits-processor-pattern=
        additional-config= io-processor-plugin=""",
    "the same steps, but sampled tokens stay on the device, where operations outside the graphs copy them": """
        async-scheduling""",
    "the model runner prepares its inputs in another way": "disable-async-output-proc",
    "sets what requests ask of the sampler by default: the spec's sampler settings must have it": """
        generation-config= override-generation-config= logprobs-mode=""",
    "a step has other outputs": "enable-return-routed-experts",
    "graphs may have to be captured again after a sleep": "enable-sleep-mode",
    "the draft model's graphs are not enumerated": "speculative-model=",
    "graphs for some adapters only": "specialize-active-lora",
    "prompts are batched in another way": "use-padding-aware-scheduling",
}
"""Why flags may change what is warm -> these flags. They count."""

_KEYED_ONLY: Mapping[str, str] = {
    "how requests are read and answered": """
        tokenizer-mode= skip-tokenizer-init reasoning-config= enable-reasoning tokens-only disable-mm-preprocessor-cache
        guided-decoding-backend= structured-outputs-config=""",
    "where and how the server listens": "api-server-count= headless",
    "logs, metrics and traces": "enable-layerwise-nvtx-tracing profiler-config= ray-workers-use-nsight",
    "how weights come to the device": """
        model-loader-extra-config= ignore-patterns= weights-load-device= weight-transfer-config= code-revision=""",
    "where ranks run, and how they find each other": """
        distributed-executor-backend= nnodes= node-rank= data-parallel-rank= data-parallel-start-rank=
        data-parallel-size-local= data-parallel-backend= data-parallel-hybrid-lb data-parallel-external-lb
        disable-nccl-for-dp-synchronization enable-fault-tolerance""",
    "of another parallelism, which is refused": "eplb-config=",
    "of other devices": """
        disable-custom-all-reduce cudagraph-capture-sizes=* cuda-graph-sizes=* max-cudagraph-capture-size=
        max-seq-len-to-capture=""",
    "which adapters fill the slots": "max-cpu-loras=",
    "chooses among the same steps": """
        max-num-partial-prefills= max-long-partial-prefills= long-prefill-token-threshold= scheduler-delay-factor=
        disable-chunked-mm-input""",
    "how cached blocks are found": "prefix-caching-hash-algo= use-v2-block-manager",
    "only measures memory": "skip-mm-profiling",
    "of pooling models, which are refused": "pooler-config= override-pooler-config=",
}
"""Why flags have no effect on shapes -> these flags. They count, because their values may reach code or vLLM's hash."""

_NEUTRAL: Mapping[str, str] = {
    "where and how the server listens": """
        host= port= uds= root-path= ssl-keyfile= ssl-certfile= ssl-ca-certs= ssl-cert-reqs= ssl-ciphers=
        enable-ssl-refresh middleware= allowed-origins= allowed-methods= allowed-headers= allow-credentials api-key=*
        h11-max-incomplete-event-size= h11-max-header-count= disable-frontend-multiprocessing
        enable-server-load-tracking sse-keep-alive-interval= shutdown-timeout= data-parallel-supervisor-port=
        dp-supervisor-probe-interval-s= dp-supervisor-probe-timeout-s= dp-supervisor-probe-failure-threshold=""",
    "how requests are read and answered": """
        tokenizer= tokenizer-revision= chat-template= chat-template-content-format= default-chat-template-kwargs=
        trust-request-chat-template response-role= tool-call-parser= tool-parser-plugin= tool-server=
        tool-strict-level= enable-auto-tool-choice exclude-tools-when-tool-choice-none reasoning-parser=
        reasoning-parser-plugin= return-tokens-as-token-ids enable-prompt-tokens-details enable-force-include-usage
        enable-request-id-headers enable-tokenizer-info-endpoint disable-fastapi-docs enable-offline-docs
        stream-interval= allowed-local-media-path= allowed-media-domains=* interleave-mm-strings
        mm-processor-cache-gb= mm-processor-cache-type= mm-shm-cache-max-object-size-mb= fingerprint-mode=
        fingerprint-value= cohere-is-reasoning-model cohere-format= anthropic-disabled-thinking-effort=""",
    "logs, metrics and traces": """
        uvicorn-log-level= log-level= logging-config= disable-uvicorn-access-log disable-access-log-for-endpoints=
        log-config-file= max-log-len= disable-log-stats aggregate-engine-logging enable-log-requests
        disable-log-requests enable-log-outputs enable-log-deltas log-error-stack show-hidden-metrics-for-version=
        otlp-traces-endpoint= collect-detailed-traces= kv-cache-metrics kv-cache-metrics-sample= cudagraph-metrics
        enable-mfu-metrics enable-logging-iteration-details enable-per-request-metrics custom-histogram-buckets=
        kv-events-config= use-tqdm-on-load""",
    "how weights come to the device": """
        download-dir= hf-token= safetensors-load-strategy= safetensors-prefetch-block-size=
        safetensors-prefetch-num-threads= max-parallel-loading-workers= pt-load-map-location=""",
    "where ranks run, and how they find each other": """
        master-addr= master-port= data-parallel-address= data-parallel-rpc-port= numa-bind numa-bind-nodes=*
        numa-bind-cpus=*""",
    "its flags are read in its place": "config=",
    "orders requests": "scheduling-policy= max-num-queued-reqs= max-num-queued-tokens=",
    "values, not shapes": "seed=",
    "which adapters fill the slots": "lora-modules=*",
}
"""Why flags change neither shapes nor code -> these flags."""

_UNREAD = """
    cpu-offload-params=* data-parallel-multi-port-external-lb dcp-q-replicate device-ids=*
    enable-batch-sharded-sampling enable-cumem-allocator enable-elastic-ep enable-ep-weight-filter
    enable-flash-late-interaction enable-flashinfer-autotune enable-hc-sp enable-mamba-cache-stochastic-rounding
    enable-mamba-shared-prefix-checkpoint enable-mixed-moe-lora-format enable-moe-shared-loras
    enable-nccl-comm-suspend enable-scale-out enable-shm-tensor-arena enable-trace-replay fail-on-environ-validation
    grpc grpc-port= jit-monitor-mode= jit-monitor-verbose kernel-config= kv-cache-dtype-skip-layers=* linear-backend=
    long-prefill-token-threshold-adaptive lora-target-modules=* mm-device-do-normalize moe-backend= offload-params=*
    per-request-spec-decode-metrics quantization-config= renderer-num-workers=
    return-sampling-mask scheduler-reserve-full-isl sleep-mode-offload-cudagraph sleep-preserve-parameter-names=*
    spec-method= spec-model= spec-tokens= swa-bounded-replay trust-request-mm-kwargs use-fp64-gumbel use-replayssm
    """
"""Flags of vLLM 0.32 that ``--from-vllm`` does not know. They count."""

SHORT_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "-tp": "tensor-parallel-size",
        "-pp": "pipeline-parallel-size",
        "-dp": "data-parallel-size",
        "-dcp": "decode-context-parallel-size",
        "-pcp": "prefill-context-parallel-size",
        "-ep": "enable-expert-parallel",
        "-n": "nnodes",
        "-r": "node-rank",
        "-q": "quantization",
        "-O": "optimization-level",
        "-cc": "compilation-config",
        "-ac": "attention-config",
        "-asc": "api-server-count",
        "-sc": "speculative-config",
        "-dpn": "data-parallel-rank",
        "-dpr": "data-parallel-start-rank",
        "-dpl": "data-parallel-size-local",
        "-dpa": "data-parallel-address",
        "-dpp": "data-parallel-rpc-port",
        "-dpb": "data-parallel-backend",
        "-dph": "data-parallel-hybrid-lb",
        "-dpe": "data-parallel-external-lb",
    }
)


def _table(rows: Iterable[tuple[str, _Row]]) -> Mapping[str, _Row]:
    """Returns rows by name. Raises ValueError if two lists have the same name."""
    found: dict[str, _Row] = {}
    for name, row in rows:
        if name in found:
            raise ValueError(f"{name} is in two lists")
        found[name] = row
    return MappingProxyType(found)


def _flag(written: str, effect: Effect, reason: str = "", *, is_neutral: bool = False) -> Flag:
    name, is_valued, more = written.partition("=")
    arity: Arity = "values" if more else "value" if is_valued else "switch"
    return Flag(name, arity, effect, reason, _NO_OP.get(name, ()), is_neutral)


def _all_flags() -> Iterator[Flag]:
    yield from (_flag(name, "taken", field) for name, field in by_name(_TAKEN))
    yield from (_flag(name, "taken", field, is_neutral=True) for name, field in by_name(_TAKEN_NEUTRAL))
    yield from (_flag(name, "refused", reason) for name, reason in by_name(_REFUSED))
    yield from (_flag(name, "unknown", reason) for name, reason in by_name(_MAY_CHANGE))
    yield from (_flag(name, "harmless", reason) for name, reason in by_name(_KEYED_ONLY))
    yield from (_flag(name, "harmless", reason, is_neutral=True) for name, reason in by_name(_NEUTRAL))
    yield from (_flag(name, "unread") for name in _UNREAD.split())


FLAGS = _table((flag.name, flag) for flag in _all_flags())
"""Every known flag, by its name without dashes."""

NEUTRAL_FLAGS: Mapping[str, str] = MappingProxyType(
    {flag.name: flag.reason for flag in FLAGS.values() if flag.is_neutral}
)
"""The flags that change no code, each with the reason."""

MEMORY_FLAGS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("gpu-memory-utilization", "num-gpu-blocks-override", "kv-cache-memory-bytes", "swap-space"),
        "how much memory there is for KV blocks, which no graph holds",
    )
)
"""Flags that are neutral on every device except Gaudi, where the number of blocks is a shape."""

BOUND_PARAMETERS = ("MIN", "STEP", "MAX", "LIMIT", "PAD_MAX", "PAD_PERCENT")
BOUND_VARIABLES = tuple(
    f"VLLM_{phase}_{dimension}_BUCKET_{parameter}"
    for phase, dimension, parameter in product(
        ("PROMPT", "DECODE"), ("BS", "QUERY", "SEQ", "CTX", "BLOCK"), BOUND_PARAMETERS
    )
)
"""The bounds of buckets, including those that belong to no axis. A spec takes them; they count."""

_TAKEN_VARIABLES = """
    VLLM_BUCKETING_STRATEGY VLLM_EXPONENTIAL_BUCKETING VLLM_BUCKETING_FROM_FILE VLLM_ENABLE_BUCKETING
    VLLM_CONTIGUOUS_PA VLLM_PREFIX_CACHING VLLM_MERGED_PREFILL VLLM_UNIFIED_ATTN
    PT_HPU_SDPA_QKV_SLICE_MODE_FWD PT_HPU_SDPA_BC_FACTOR VLLM_FUSEDSDPA_SLIDE_THLD VLLM_DEFRAG
    VLLM_DEFRAG_THRESHOLD VLLM_DEFRAG_WITH_GRAPHS PT_HPU_LAZY_MODE VLLM_GRAPH_RESERVED_MEM
    VLLM_SKIP_WARMUP VLLM_MULTIMODAL_BUCKETS VLLM_MULTIMODAL_RESOLUTIONS VLLM_ALLOW_LONG_MAX_MODEL_LEN
    QUANT_CONFIG
    """
"""Other variables that a spec takes. They count."""

_MAY_CHANGE_VARIABLES: Mapping[str, str] = {
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
    "warms up the vision tower in another way": "VLLM_MM_WARMUP_OUTSIDE_COMPILE_ONLY",
    "decides how KV blocks travel between servers": """
        VLLM_KV_TRANSFER_CONFIG VLLM_KV_CONNECTOR VLLM_HPU_HETERO_KV_LAYOUT VLLM_HPU_NIXL_JOINT_KV
        VLLM_HPU_NIXL_STAGING_SLOTS VLLM_NIXL_DEVICE_TO_DEVICE""",
    "for ranks that others start: a server starts its own with --data-parallel-size": "VLLM_DP_SIZE VLLM_DP_RANK",
    "decides how tokens reach their experts": "VLLM_ALL2ALL_BACKEND",
}
"""Why variables may change what is warm -> these variables. They count."""

_OF_THE_BRIDGE = """
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
"""Variables without ``PT_HPU_`` that make the bridge compile other code. They count, unless the bridge says otherwise
(`aotgaudi.gaudi.environment`)."""

_KEYED_ONLY_VARIABLES: Mapping[str, str] = {
    "where and how the server listens": "VLLM_API_KEY",
    "logs, metrics and traces": """
        VLLM_TRACE_FUNCTION VLLM_PT_PROFILE VLLM_PROFILE_PROMPT VLLM_PROFILE_DECODE VLLM_PROFILE_STEPS
        VLLM_PROFILE_UNIFIED
        PT_HPU_METRICS_GC_DETAILS PT_HPU_METRICS_FILE PT_HPU_METRICS_FILE_FORMAT PT_HPU_METRICS_DUMP_TRIGGERS
        PT_HPU_ENABLE_CACHE_METRICS""",
    "where files are kept": "PT_HPU_RECIPE_CACHE_CONFIG",
    "how requests are read and answered": """
        VLLM_VIDEO_LOADER_BACKEND VLLM_MM_INPUT_CACHE_GIB VLLM_MM_INPUT_CACHE_SIZE VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        VLLM_DETOKENIZE_ON_OPENAI_SERVER VLLM_V0_USE_OUTLINES_CACHE VLLM_V1_USE_OUTLINES_CACHE
        VLLM_LOGITS_PROCESSOR_THREADS""",
    "how processes are started and speak to each other": """
        VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ALLOW_INSECURE_SERIALIZATION
        VLLM_USE_RAY_SPMD_WORKER VLLM_USE_RAY_COMPILED_DAG VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
        VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES
        VLLM_WEIGHT_LOAD_FORCE_SYNC VLLM_GC_THR_MULTIPLIER VLLM_HPU_NIXL_FORCE_UCX_TCP""",
    "counts when vLLM itself is built": """
        VLLM_TARGET_DEVICE VLLM_USE_PRECOMPILED VLLM_PRECOMPILED_WHEEL_LOCATION
        VLLM_TEST_USE_PRECOMPILED_NIGHTLY_WHEEL""",
    "of other devices": """
        VLLM_NCCL_SO_PATH VLLM_CUDART_SO_PATH VLLM_SKIP_P2P_CHECK VLLM_USE_TRITON_FLASH_ATTN VLLM_USE_TRITON_AWQ
        VLLM_FLASH_ATTN_VERSION VLLM_MARLIN_USE_ATOMIC_ADD""",
    "which adapters fill the slots": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
}
"""Why variables have no effect on shapes -> these variables. They count."""

_FROM_ELSEWHERE = "takes the model from elsewhere: give its config.json with --model-config"
_NEUTRAL_VARIABLES: Mapping[str, str] = {
    _FROM_ELSEWHERE: "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH",
    "where files are kept": """
        VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_XLA_CACHE_PATH
        VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_DEBUG_DUMP_PATH
        VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR
        FLASHINFER_WORKSPACE_BASE DG_JIT_CACHE_DIR TVM_FFI_CACHE_DIR TILELANG_CACHE_DIR CUTE_DSL_CACHE_DIR
        AITER_JIT_DIR""",
    "set for each phase of a capture": "VLLM_FORCE_AOT_LOAD TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS",
    "where and how the server listens": """
        VLLM_PORT VLLM_HOST_IP VLLM_SERVER_DEV_MODE VLLM_RPC_BASE_PATH VLLM_HTTP_TIMEOUT_KEEP_ALIVE
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_NIXL_SIDE_CHANNEL_HOST""",
    "logs, metrics and traces": """
        VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR
        VLLM_LOG_STATS_INTERVAL VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS
        VLLM_DO_NOT_TRACK VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_DEBUG VLLM_NO_DEPRECATION_WARNING
        VLLM_PROFILER_ENABLED VLLM_TORCH_PROFILER_DIR VLLM_TORCH_PROFILER_WITH_* VLLM_TORCH_PROFILER_RECORD_SHAPES
        VLLM_HPU_LOG_STEP_GRAPH_COMPILATION VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL VLLM_HPU_LOG_STEP_CPU_FALLBACKS
        VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL""",
    "how long it waits": """
        VLLM_RPC_TIMEOUT VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_NIXL_ABORT_REQUEST_TIMEOUT VLLM_SLEEP_WHEN_IDLE""",
    "how requests are read and answered": """
        VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_FETCH_MAX_RETRIES
        VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
        VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS
        VLLM_MAX_EMBED_DECODE_BYTES""",
    "how processes are started and speak to each other": """
        VLLM_WORKER_MULTIPROC_METHOD VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT""",
    "threads of kernels that are compiled for any number of them": "OMP_* KMP_* GOMP_* MKL_NUM_THREADS",
}
"""Why variables change no code -> these variables, or patterns of them."""

_CONDITIONS: Mapping[str, str] = {
    "which image or build this is": """
        VLLM_IMAGE_TAG VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_DOCKER_BUILD_CONTEXT""",
    "how long it waits": """
        VLLM_ENGINE_READY_TIMEOUT_S VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_REGEX_COMPILATION_TIMEOUT_S
        VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_MOONCAKE_CONNECTOR_TIMEOUT
        VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT""",
    "logs, metrics and traces": """
        VLLM_CONFIGURE_LOGGING VLLM_LOG_BATCHSIZE_INTERVAL VLLM_DISABLE_LOG_LOGO VLLM_LOG_MODEL_INSPECTION
        VLLM_USAGE_SOURCE""",
    "how requests are read and answered": """
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MAX_N_SEQUENCES
        VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_SYSTEM_START_DATE""",
    "where files are kept": "VLLM_XGRAMMAR_CACHE_MB VLLM_LORA_RESOLVER_CACHE_DIR CUDA_HOME",
    "how processes are started and speak to each other": "VLLM_MQ_MAX_CHUNK_BYTES_MB",
    "counts when vLLM itself is built": "NVCC_THREADS CMAKE_BUILD_TYPE VERBOSE",
    "where adapters are looked for": "VLLM_LORA_RESOLVER_HF_REPO_LIST",
}
"""Why variables change no code, although vLLM hashes them -> these variables. A pod can set them as in the build."""

_CONDITIONS_OF_THE_POD: Mapping[str, str] = {
    "where and how the server listens": """
        VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
        VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT MOONCAKE_PREFERRED_SEGMENT
        MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_LOOPBACK_IP VLLM_GPU_NIC_PCIE_MAPPING""",
    "what its processes are called": "VLLM_PROCESS_NAME_PREFIX",
    "which cores its threads run on": "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU",
}
"""The same for variables that must differ from pod to pod."""

NEUTRAL_VARIABLES: Mapping[str, str] = MappingProxyType(dict(by_name(_NEUTRAL_VARIABLES)))
"""The variables (or patterns of them) that change no code, each with the reason."""

CONDITIONS: Mapping[str, Hashed] = MappingProxyType(
    {
        **{name: Hashed(reason) for name, reason in by_name(_CONDITIONS)},
        **{name: Hashed(reason, is_of_pod=True) for name, reason in by_name(_CONDITIONS_OF_THE_POD)},
    }
)
"""The variables that change no code, although vLLM hashes them."""

_OTHER_DEVICES = re.compile(r"VLLM_(ROCM|CPU|XLA|TPU|OPENVINO|NEURON|FLASHINFER|USE_FLASHINFER|CUDA)_.*")


def _all_variables() -> Iterator[tuple[str, Variable]]:
    yield from ((name, Variable("taken")) for name in (*_TAKEN_VARIABLES.split(), *BOUND_VARIABLES))
    yield from ((name, Variable("unknown", reason)) for name, reason in by_name(_MAY_CHANGE_VARIABLES))
    for name in _OF_THE_BRIDGE.split():
        yield f"PT_HPU_{name}", Variable("unknown", "the bridge compiles other code")
    for table in (_KEYED_ONLY_VARIABLES, _NEUTRAL_VARIABLES, _CONDITIONS, _CONDITIONS_OF_THE_POD):
        for name, reason in by_name(table):
            yield name, Variable("unknown" if reason == _FROM_ELSEWHERE else "harmless", reason)


VARIABLES = _table(_all_variables())
"""The effect on shapes of every known variable, by its name."""


def variable_effect(name: str) -> Variable | None:
    """Returns the effect of a variable on shapes; None for an unknown variable."""
    return Variable("harmless", "of other devices") if _OTHER_DEVICES.fullmatch(name) else VARIABLES.get(name)


def is_looked_at(name: str) -> bool:
    """Returns whether a variable belongs to vLLM or the bridge, or may change what is warm. All others are ignored."""
    effect = VARIABLES.get(name)
    return name.startswith(("VLLM_", "PT_HPU")) or (effect is not None and effect.effect != "harmless")
