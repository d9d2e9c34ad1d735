"""The flags of ``vllm serve``: which of them a spec takes, which it refuses, and what the others do to what is warm.

Names and arities are those of vllm/engine/arg_utils.py, vllm/entrypoints/openai/cli_args.py, and of vllm-fork's
additions to the former. A flag is `harmless` only with a reason why it changes nothing that is warm; every other flag
that a spec has no place for may change it, and the report says so.

The flags of vLLM as a guest: how many words each takes, and which are acted on.

Names are those of `aotgaudi.wrap.flags`, and what vllm/engine/arg_utils.py and vllm/entrypoints/launchers/cli_args.py
of 0.32 have besides. A flag that is missing here is read all the same, and counts: by this table a word after a switch is
told from its value.

What changes no code that vLLM compiles: flags and variables, each with the reason.

Everything else counts. A flag is here only if its value reaches no graph and vLLM 0.32's own hash does not hold it
(``compute_hash`` of vllm/config/*.py); a variable only if ``compile_factors`` of vllm/envs.py ignores it. One that changes
nothing and is in that hash all the same is in `HASHED`: a condition. ``wrap.vllm.flags`` has another list of harmless
flags, which means those without effect on *shapes* (``compilation-config`` is one): it says nothing about code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from aotgaudi.wrap.command_line import Arity
from aotgaudi.wrap.variables import Hashed, by_name

Effect = Literal["taken", "refused", "harmless", "unknown"]
"""``taken``: becomes part of the spec; ``unknown``: may change what is warm."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `reason`: why it is refused, harmless or may change what is warm; empty where it is taken.

    `neutral`: values with which a refused flag asks for nothing.
    """

    name: str
    arity: Arity
    effect: Effect
    reason: str = ""
    neutral: tuple[str, ...] = ()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SWITCHES = _names(
    """
    enforce-eager enable-prefix-caching enable-chunked-prefill language-model-only enable-expert-parallel
    enable-lora fully-sharded-loras enable-eplb enable-dbo enable-tower-connector-lora calculate-kv-scales
    disable-sliding-window split-qkv trust-remote-code allow-deprecated-quantization disable-cascade-attn
    skip-tokenizer-init enable-prompt-embeds enable-sleep-mode enable-return-routed-experts
    use-tqdm-on-load data-parallel-hybrid-lb data-parallel-external-lb disable-nccl-for-dp-synchronization
    ray-workers-use-nsight disable-custom-all-reduce kv-sharing-fast-prefill enable-mm-embeds
    mm-encoder-only interleave-mm-strings skip-mm-profiling kv-cache-metrics cudagraph-metrics
    enable-layerwise-nvtx-tracing enable-mfu-metrics enable-logging-iteration-details
    disable-chunked-mm-input disable-hybrid-kv-cache-manager async-scheduling disable-log-stats
    aggregate-engine-logging enable-log-requests disable-log-requests enable-log-outputs enable-log-deltas
    allow-credentials enable-ssl-refresh trust-request-chat-template return-tokens-as-token-ids
    enable-auto-tool-choice exclude-tools-when-tool-choice-none disable-uvicorn-access-log
    disable-fastapi-docs enable-request-id-headers enable-prompt-tokens-details enable-per-request-metrics
    enable-server-load-tracking enable-force-include-usage enable-tokenizer-info-endpoint
    enable-offline-docs log-error-stack tokens-only enable-reasoning disable-frontend-multiprocessing
    headless use-v2-block-manager disable-async-output-proc disable-mm-preprocessor-cache
    enable-fault-tolerance specialize-active-lora use-padding-aware-scheduling
    """
)
_LISTS = _names(
    """
    served-model-name lora-modules api-key allowed-media-domains cudagraph-capture-sizes cuda-graph-sizes
    logits-processors
    """
)

_TAKEN = """
    model max-num-seqs max-num-batched-tokens max-model-len block-size num-gpu-blocks-override gpu-memory-utilization
    dtype speculative-config num-speculative-tokens revision max-num-prefill-seqs limit-mm-per-prompt
    served-model-name enforce-eager enable-prefix-caching enable-chunked-prefill language-model-only
    tensor-parallel-size pipeline-parallel-size enable-expert-parallel quantization kv-cache-dtype enable-lora
    max-loras max-lora-rank lora-dtype fully-sharded-loras lora-extra-vocab-size
    """

_NOT_ENUMERATED = "the steps or graphs that it adds are not enumerated"
_REFUSED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "data-parallel-size": (
        "ranks of data parallelism pad their steps to each other's: describe one replica",
        ("1",),
    ),
    "decode-context-parallel-size prefill-context-parallel-size": (_NOT_ENUMERATED, ("1",)),
    "enable-eplb enable-dbo enable-tower-connector-lora default-mm-loras split-qkv": (_NOT_ENUMERATED, ()),
    "kv-transfer-config ec-transfer-config": ("transfers between servers add steps of theirs", ()),
    "num-scheduler-steps": ("multi-step scheduling adds steps of its own", ("0", "1")),
    "task runner": (
        "pooling models have no decode steps; only text generation is enumerated",
        ("auto", "generate"),
    ),
    "convert": ("pooling models have no decode steps; only text generation is enumerated", ("auto", "none")),
    "config": ("the file is not read: give its flags on the command line", ()),
    "hf-overrides hf-config-path disable-sliding-window": (
        "give the changed config.json with --model-config instead",
        (),
    ),
    "device": ("a spec of a vLLM command is for Gaudi", ("hpu", "auto")),
    "cpu-offload-gb": ("offloaded weights change the graphs", ("0", "0.0")),
}

_MAY_CHANGE: Mapping[str, str] = {
    "chooses the attention's code": "attention-backend attention-config mm-encoder-attn-backend disable-cascade-attn",
    "chooses how graphs are compiled": "compilation-config optimization-level",
    "chooses the model's code": "model-impl trust-remote-code config-format kv-sharing-fast-prefill",
    "is part of the code of recurrent layers": "mamba-cache-dtype mamba-ssm-cache-dtype",
    "decides the shape of recurrent states": "mamba-block-size mamba-cache-mode",
    "lets prompts be embeddings, whose steps have other inputs": "enable-prompt-embeds enable-mm-embeds",
    "scales are computed in steps that are not enumerated": "calculate-kv-scales",
    "some formats bring a quantization of their own": "load-format allow-deprecated-quantization",
    "decides how many KV blocks a server counts for itself": "kv-cache-memory-bytes",
    "copies KV blocks to the host and back": "swap-space preemption-mode kv-offloading-size kv-offloading-backend",
    "decides the sizes that images and videos are computed in": (
        "mm-processor-kwargs video-pruning-rate mm-encoder-tp-mode mm-encoder-only media-io-kwargs"
    ),
    "layers may share KV blocks otherwise": "disable-hybrid-kv-cache-manager",
    "replaces code of the server": (
        "worker-cls worker-extension-cls scheduler-cls logits-processors logits-processor-pattern additional-config"
        " io-processor-plugin"
    ),
    "the model runner prepares its inputs in another way": "async-scheduling disable-async-output-proc",
    "sets what requests ask of the sampler by default: the spec's sampler settings must have it": (
        "generation-config override-generation-config max-logprobs logprobs-mode"
    ),
    "a step has other outputs": "enable-return-routed-experts",
    "graphs may have to be captured again after a sleep": "enable-sleep-mode",
    "the draft model's graphs are not enumerated": "speculative-model",
    "graphs for some adapters only": "specialize-active-lora",
    "prompts are batched in another way": "use-padding-aware-scheduling",
}

_HARMLESS: Mapping[str, str] = {
    "where and how the server listens": """
        host port uds root-path ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh
        api-server-count middleware allowed-origins allowed-methods allowed-headers allow-credentials headless
        h11-max-incomplete-event-size h11-max-header-count disable-frontend-multiprocessing api-key
        enable-server-load-tracking""",
    "how requests are read and answered": """
        tokenizer tokenizer-mode tokenizer-revision skip-tokenizer-init chat-template chat-template-content-format
        default-chat-template-kwargs trust-request-chat-template response-role tool-call-parser tool-parser-plugin
        tool-server enable-auto-tool-choice exclude-tools-when-tool-choice-none reasoning-parser
        reasoning-parser-plugin reasoning-config enable-reasoning return-tokens-as-token-ids tokens-only
        enable-prompt-tokens-details enable-force-include-usage enable-request-id-headers
        enable-tokenizer-info-endpoint disable-fastapi-docs enable-offline-docs stream-interval
        allowed-local-media-path allowed-media-domains interleave-mm-strings mm-processor-cache-gb
        mm-processor-cache-type mm-shm-cache-max-object-size-mb disable-mm-preprocessor-cache fingerprint-mode
        fingerprint-value guided-decoding-backend structured-outputs-config""",
    "logs, metrics and traces": """
        uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints log-config-file max-log-len
        disable-log-stats aggregate-engine-logging enable-log-requests disable-log-requests enable-log-outputs
        enable-log-deltas log-error-stack show-hidden-metrics-for-version otlp-traces-endpoint
        collect-detailed-traces kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics
        enable-layerwise-nvtx-tracing enable-mfu-metrics enable-logging-iteration-details enable-per-request-metrics
        profiler-config kv-events-config ray-workers-use-nsight use-tqdm-on-load""",
    "how weights come to the device": """
        download-dir safetensors-load-strategy model-loader-extra-config ignore-patterns pt-load-map-location
        weights-load-device weight-transfer-config max-parallel-loading-workers hf-token code-revision""",
    "where ranks run, and how they find each other": """
        distributed-executor-backend master-addr master-port nnodes node-rank data-parallel-rank
        data-parallel-start-rank data-parallel-size-local data-parallel-address data-parallel-rpc-port
        data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb
        disable-nccl-for-dp-synchronization enable-fault-tolerance""",
    "of another parallelism, which is refused": "all2all-backend eplb-config expert-placement-strategy",
    "of other devices": """
        disable-custom-all-reduce cudagraph-capture-sizes cuda-graph-sizes max-cudagraph-capture-size
        max-seq-len-to-capture""",
    "which adapters fill the slots": "lora-modules max-cpu-loras",
    "chooses among the same steps": """
        max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold scheduler-delay-factor
        disable-chunked-mm-input""",
    "orders requests": "scheduling-policy",
    "how cached blocks are found": "prefix-caching-hash-algo use-v2-block-manager",
    "only measures memory": "skip-mm-profiling",
    "values, not shapes": "seed",
    "of pooling models, which are refused": "pooler-config override-pooler-config",
}


def _arity(name: str) -> Arity:
    return "switch" if name in _SWITCHES else "values" if name in _LISTS else "value"


def _all() -> Iterator[Flag]:
    yield from (Flag(name, _arity(name), "taken") for name in _TAKEN.split())
    for names, (reason, neutral) in _REFUSED.items():
        yield from (Flag(name, _arity(name), "refused", reason, neutral) for name in names.split())
    for reason, text in _MAY_CHANGE.items():
        yield from (Flag(name, _arity(name), "unknown", reason) for name in text.split())
    for reason, text in _HARMLESS.items():
        yield from (Flag(name, _arity(name), "harmless", reason) for name in text.split())


FLAGS: Mapping[str, Flag] = MappingProxyType({flag.name: flag for flag in _all()})

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
    }
)


def nearest_flag(name: str) -> str | None:
    """Returns the known flag whose name is most like `name`; None where none is."""
    close = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.75)
    return close[0] if close else None


_NEWER_SWITCHES = """
    cudagraph-metrics dcp-q-replicate enable-batch-sharded-sampling enable-cumem-allocator enable-elastic-ep
    enable-ep-weight-filter enable-flashinfer-autotune enable-flash-late-interaction enable-hc-sp
    enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mixed-moe-lora-format
    enable-moe-shared-loras enable-nccl-comm-suspend enable-scale-out enable-shm-tensor-arena enable-trace-replay
    fail-on-environ-validation grpc jit-monitor-verbose long-prefill-token-threshold-adaptive mm-device-do-normalize
    per-request-spec-decode-metrics return-sampling-mask scheduler-reserve-full-isl sleep-mode-offload-cudagraph
    swa-bounded-replay trust-request-mm-kwargs use-fp64-gumbel use-replayssm cohere-is-reasoning-model
    data-parallel-multi-port-external-lb numa-bind enable-eplb disable-log-requests
    """
_NEWER_LISTS = """
    device-ids lora-target-modules kv-cache-dtype-skip-layers numa-bind-nodes numa-bind-cpus offload-params
    cpu-offload-params sleep-preserve-parameter-names
    """
_NEWER_VALUES = """
    grpc-port log-level logging-config fingerprint-mode fingerprint-value tool-strict-level sse-keep-alive-interval
    cohere-format anthropic-disabled-thinking-effort data-parallel-supervisor-port dp-supervisor-probe-interval-s
    dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold shutdown-timeout renderer-num-workers
    performance-mode kernel-config moe-backend linear-backend quantization-config spec-method spec-model spec-tokens
    jit-monitor-mode custom-histogram-buckets max-num-queued-reqs max-num-queued-tokens
    """

_NEWER_SHORT = {
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


def _arities() -> dict[str, Arity]:
    found: dict[str, Arity] = {flag.name: flag.arity for flag in FLAGS.values()}
    found |= dict.fromkeys(_NEWER_VALUES.split(), "value")
    found |= dict.fromkeys(_NEWER_SWITCHES.split(), "switch")
    found |= dict.fromkeys(_NEWER_LISTS.split(), "values")
    return found


ARITIES: Mapping[str, Arity] = MappingProxyType(_arities())

SHORT: Mapping[str, str] = MappingProxyType({**SHORT_FLAGS, **_NEWER_SHORT})

SIGNIFICANT = frozenset(
    {
        *(
            "model",
            "revision",
            "download-dir",
            "served-model-name",
            "config",
            "max-model-len",
            "max-num-seqs",
        ),
        *("host", "port", "uds", "headless", "api-server-count"),
        *("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "nnodes"),
        *("distributed-executor-backend", "data-parallel-backend"),
    }
)
"""Flags that are acted on: a beginning of one is refused."""


_NEUTRAL_FLAGS: Mapping[str, str] = {
    "the model counts by the content of its files": "model served-model-name download-dir hf-token",
    "where and how the server listens": """
        host port uds root-path ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh
        middleware allowed-origins allowed-methods allowed-headers allow-credentials api-key
        h11-max-incomplete-event-size h11-max-header-count disable-frontend-multiprocessing enable-server-load-tracking
        sse-keep-alive-interval shutdown-timeout data-parallel-supervisor-port dp-supervisor-probe-interval-s
        dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold""",
    "how requests are read and answered": """
        tokenizer tokenizer-revision chat-template chat-template-content-format default-chat-template-kwargs
        trust-request-chat-template response-role tool-call-parser tool-parser-plugin tool-server tool-strict-level
        enable-auto-tool-choice exclude-tools-when-tool-choice-none reasoning-parser reasoning-parser-plugin
        return-tokens-as-token-ids enable-prompt-tokens-details enable-force-include-usage enable-request-id-headers
        enable-tokenizer-info-endpoint disable-fastapi-docs enable-offline-docs stream-interval allowed-local-media-path
        allowed-media-domains interleave-mm-strings mm-processor-cache-gb mm-processor-cache-type
        mm-shm-cache-max-object-size-mb fingerprint-mode fingerprint-value cohere-is-reasoning-model cohere-format
        anthropic-disabled-thinking-effort""",
    "logs, metrics and traces": """
        uvicorn-log-level log-level logging-config disable-uvicorn-access-log disable-access-log-for-endpoints
        log-config-file max-log-len disable-log-stats aggregate-engine-logging enable-log-requests
        disable-log-requests enable-log-outputs enable-log-deltas log-error-stack show-hidden-metrics-for-version
        otlp-traces-endpoint collect-detailed-traces kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics
        enable-mfu-metrics enable-logging-iteration-details enable-per-request-metrics custom-histogram-buckets
        kv-events-config use-tqdm-on-load""",
    "how weights come to the device": """
        safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads
        max-parallel-loading-workers pt-load-map-location""",
    "how processes find each other": """
        master-addr master-port data-parallel-address data-parallel-rpc-port numa-bind numa-bind-nodes numa-bind-cpus""",
    "which request is next": "scheduling-policy max-num-queued-reqs max-num-queued-tokens",
    "values, not code": "seed",
    "which adapters fill the slots": "lora-modules",
}
NEUTRAL_FLAGS: Mapping[str, str] = MappingProxyType(dict(by_name(_NEUTRAL_FLAGS)))

_NEUTRAL_VARIABLES: Mapping[str, str] = {
    "where files are kept; set below the place's root": """
        VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_XLA_CACHE_PATH
        VLLM_RPC_BASE_PATH VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
        VLLM_DEBUG_DUMP_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR
        TORCH_EXTENSIONS_DIR FLASHINFER_WORKSPACE_BASE DG_JIT_CACHE_DIR TVM_FFI_CACHE_DIR TILELANG_CACHE_DIR
        CUTE_DSL_CACHE_DIR AITER_JIT_DIR""",
    "set for each phase of a capture": "VLLM_FORCE_AOT_LOAD TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS",
    "where the server listens, and where it is": "VLLM_PORT VLLM_HOST_IP VLLM_SERVER_DEV_MODE",
    "how long it waits": """
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_RINGBUFFER_WARNING_INTERVAL""",
    "logs and statistics": """
        VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR
        VLLM_LOG_STATS_INTERVAL VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS
        VLLM_DO_NOT_TRACK""",
    "how media of requests are fetched": """
        VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_FETCH_MAX_RETRIES
        VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
        VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS
        VLLM_MAX_EMBED_DECODE_BYTES""",
    "where the model comes from; it counts by its content": "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH",
    "how processes are started and speak to each other": """
        VLLM_WORKER_MULTIPROC_METHOD VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT""",
    "threads of kernels that are compiled for any number of them": "OMP_* KMP_* GOMP_* MKL_NUM_THREADS",
}
NEUTRAL_VARIABLES: Mapping[str, str] = MappingProxyType(dict(by_name(_NEUTRAL_VARIABLES)))

_HASHED: Mapping[str, str] = {
    "which image or build this is": """
        VLLM_IMAGE_TAG VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_USAGE_SOURCE VLLM_DOCKER_BUILD_CONTEXT""",
    "how long it waits": """
        VLLM_ENGINE_READY_TIMEOUT_S VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
        VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S
        VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT""",
    "logs": "VLLM_CONFIGURE_LOGGING VLLM_LOG_BATCHSIZE_INTERVAL VLLM_DISABLE_LOG_LOGO VLLM_LOG_MODEL_INSPECTION",
    "what requests may ask": """
        VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS
        VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API
        VLLM_SYSTEM_START_DATE""",
    "memory of requests and messages": "VLLM_XGRAMMAR_CACHE_MB VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD",
    "where the toolkit lies": "CUDA_HOME",
    "counts when vLLM itself is built": "NVCC_THREADS CMAKE_BUILD_TYPE VERBOSE",
    "where adapters are looked for": "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST",
}
_HASHED_OF_POD: Mapping[str, str] = {
    "where other servers reach this one": """
        VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
        VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT MOONCAKE_PREFERRED_SEGMENT
        MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_LOOPBACK_IP VLLM_GPU_NIC_PCIE_MAPPING""",
    "what its processes are called": "VLLM_PROCESS_NAME_PREFIX",
    "which cores its threads run on": "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU",
}
HASHED: Mapping[str, Hashed] = MappingProxyType(
    {
        **{name: Hashed(reason) for name, reason in by_name(_HASHED)},
        **{name: Hashed(reason, is_of_pod=True) for name, reason in by_name(_HASHED_OF_POD)},
    }
)
