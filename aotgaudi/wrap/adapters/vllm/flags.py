"""The flags of vLLM as a guest: how many words each takes, and which are acted on.

Names are those of `aotgaudi.wrap.vllm.flags`, and what vllm/engine/arg_utils.py and vllm/entrypoints/launchers/cli_args.py
of 0.32 have besides. A flag that is missing here is read all the same, and counts: by this table a word after a switch is
told from its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aotgaudi.wrap.vllm.flag_reader import Arity
from aotgaudi.wrap.vllm.flags import FLAGS, SHORT_FLAGS

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
