"""What changes no code that vLLM compiles: flags and variables, each with the reason.

Everything else counts. A flag is here only if its value reaches no graph and vLLM 0.32's own hash does not hold it
(``compute_hash`` of vllm/config/*.py); a variable only if ``compile_factors`` of vllm/envs.py ignores it. One that changes
nothing and is in that hash all the same is in `HASHED`: a condition. ``wrap.vllm.flags`` has another list of harmless
flags, which means those without effect on *shapes* (``compilation-config`` is one): it says nothing about code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aotgaudi.wrap.adapters.variables import Hashed, by_name

_FLAGS: Mapping[str, str] = {
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
FLAGS: Mapping[str, str] = MappingProxyType(dict(by_name(_FLAGS)))

_VARIABLES: Mapping[str, str] = {
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
VARIABLES: Mapping[str, str] = MappingProxyType(dict(by_name(_VARIABLES)))

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
