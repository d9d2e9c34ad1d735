"""What changes no code that SGLang compiles: flags and variables, each with the reason. Everything else counts.

SGLang's caches have no hash over flags of their own, so a flag is here only if its value reaches no kernel and no shape
(``srt/arg_groups/fields/*.py`` has them all).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aotgaudi.wrap.adapters.variables import by_name

CHUNK = "chunked-prefill-size"
"""The flag that bounds the tokens of a step; SGLang's default follows the device's memory. It does count."""

_FLAGS: Mapping[str, str] = {
    "the model counts by the content of its files": "model-path served-model-name download-dir weight-version",
    "where and how the server listens": """
        host port nccl-port dist-init-addr gated-launch-port fastapi-root-path api-key admin-api-key enable-http2
        enable-http-worker-reuseport http2-initial-connection-window-size http2-max-concurrent-streams""",
    "how requests are read and answered": """
        tokenizer-path tokenizer-mode tokenizer-backend chat-template hf-chat-template-name completion-template
        default-chat-template-kwargs trust-request-chat-template tool-call-parser reasoning-parser tool-server
        stream-interval incremental-streaming-output enable-cache-report enable-response-store file-storage-path
        return-input-ids return-output-ids preferred-sampling-params sampling-defaults""",
    "logs, metrics and traces": """
        log-level log-level-http log-requests log-requests-level log-requests-format log-requests-target show-time-cost
        enable-metrics enable-metrics-for-all-schedulers enable-request-time-stats-logging enable-mfu-metrics
        decode-log-interval extra-metric-labels tokenizer-metrics-custom-labels-header enable-trace trace-modules
        otlp-traces-endpoint otlp-service-name crash-dump-folder uvicorn-access-log-exclude-prefixes
        bucket-time-to-first-token bucket-inter-token-latency bucket-e2e-request-latency prompt-tokens-buckets
        generation-tokens-buckets export-metrics-to-file export-metrics-to-file-dir kv-events-config""",
    "how weights come to the device": """
        weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads weight-loader-disable-mmap
        weight-loader-drop-cache-after-load""",
    "how long it waits": "watchdog-timeout soft-watchdog-timeout dist-timeout gc-warning-threshold-secs sleep-on-idle",
    "which request is next": "schedule-policy priority-scheduling-preemption-threshold max-queued-requests",
    "values, not code": "random-seed",
}
FLAGS: Mapping[str, str] = MappingProxyType(dict(by_name(_FLAGS)))

_VARIABLES: Mapping[str, str] = {
    "where files are kept; set below the place's root": """
        SGLANG_CACHE_DIR SGLANG_DG_CACHE_DIR SGLANG_CUTE_AOT_CACHE_DIR SGLANG_JIT_CACHE_DIR TORCHINDUCTOR_CACHE_DIR
        TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR FLASHINFER_WORKSPACE_BASE DG_JIT_CACHE_DIR TVM_FFI_CACHE_DIR
        TILELANG_CACHE_DIR CUTE_DSL_CACHE_DIR""",
    "set for each phase of a capture": "SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE",
    "where the server listens, and where it is": "SGLANG_PORT SGLANG_HOST_IP SGLANG_TCP_STORE_PORT SGLANG_BACKUP_PORT_BASE",
    "how long it waits": "SGLANG_WARMUP_TIMEOUT SGLANG_TIMEOUT_KEEP_ALIVE SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT",
    "logs": "SGLANG_LOG_* SGLANG_JIT_CACHE_DEBUG",
    "crash reports": "SGLANG_CUDA_COREDUMP* SGLANG_PYSPY_DUMP_BEFORE_CRASH",
    "where the model comes from; it counts by its content": "SGLANG_USE_MODELSCOPE",
}
VARIABLES: Mapping[str, str] = MappingProxyType(dict(by_name(_VARIABLES)))
