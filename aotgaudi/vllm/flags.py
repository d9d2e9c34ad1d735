"""The flags of ``vllm serve``: which of them a spec takes, which change no graph, and which it cannot express.

Names and arities are those of vllm/engine/arg_utils.py, vllm/entrypoints/openai/cli_args.py, and of vllm-fork's
additions to the former.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Arity = Literal["value", "switch", "values"]
"""``switch`` flags have a ``--no-`` form; ``values`` flags take all words up to the next flag."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    `neutral`: of a flag that cannot be expressed, the values that ask for nothing; `refusal` is why any other is
    refused, None for flags that can be. `is_taken`: whether it becomes part of the spec.
    """

    name: str
    arity: Arity
    is_taken: bool = False
    refusal: str | None = None
    neutral: tuple[str, ...] = ()


def _flags(arity: Arity, names: str) -> Iterable[Flag]:
    return (Flag(name, arity) for name in names.split())


def _taken(arity: Arity, names: str) -> Iterable[Flag]:
    return (Flag(name, arity, is_taken=True) for name in names.split())


def _refused(arity: Arity, names: str, refusal: str, neutral: tuple[str, ...] = ()) -> Iterable[Flag]:
    return (Flag(name, arity, refusal=refusal, neutral=neutral) for name in names.split())


_ONE_DEVICE = "a spec describes the graphs of one device"
_LORA = "graphs with LoRA adapters are not enumerated"
_QUANTIZED = "quantized graphs are not enumerated"
_POOLING = "pooling models have no decode steps; only text generation is enumerated"
_UNREAD_FILE = "the file is not read: give its flags on the command line"
_OTHER_CACHE = "the KV cache has the model's dtype"
_OTHER_MODEL = "give the changed config.json with --model-config instead"
_ZERO_OR_ONE = ("0", "1")

_REFUSED = (
    *_refused(
        "value",
        "tensor-parallel-size pipeline-parallel-size data-parallel-size decode-context-parallel-size"
        " prefill-context-parallel-size nnodes",
        _ONE_DEVICE,
        ("1",),
    ),
    *_refused("switch", "enable-expert-parallel enable-eplb enable-dbo", _ONE_DEVICE),
    *_refused("switch", "enable-lora fully-sharded-loras enable-tower-connector-lora", _LORA),
    *_refused("values", "lora-modules", _LORA),
    *_refused("value", "default-mm-loras", _LORA),
    *_refused("value", "quantization", _QUANTIZED, ("None", "none")),
    *_refused("switch", "calculate-kv-scales", _OTHER_CACHE),
    *_refused("value", "kv-cache-dtype", _OTHER_CACHE, ("auto", "bfloat16")),
    *_refused("value", "task", _POOLING, ("auto", "generate")),
    *_refused("value", "runner", _POOLING, ("auto", "generate")),
    *_refused("value", "convert", _POOLING, ("auto", "none")),
    *_refused("value", "config", _UNREAD_FILE),
    *_refused("value", "hf-overrides hf-config-path", _OTHER_MODEL),
    *_refused("switch", "disable-sliding-window", _OTHER_MODEL),
    *_refused(
        "value", "kv-transfer-config ec-transfer-config", "transfers between servers add steps of theirs"
    ),
    *_refused("value", "num-scheduler-steps", "multi-step scheduling adds steps of its own", _ZERO_OR_ONE),
    *_refused("switch", "split-qkv", "it changes the model's code"),
    *_refused("value", "cpu-offload-gb", "offloaded weights change the graphs", ("0", "0.0")),
)

_TAKEN = (
    *_taken(
        "value",
        "model max-num-seqs max-num-batched-tokens max-model-len block-size num-gpu-blocks-override"
        " gpu-memory-utilization dtype speculative-config num-speculative-tokens revision max-num-prefill-seqs"
        " limit-mm-per-prompt",
    ),
    *_taken("values", "served-model-name"),
    *_taken(
        "switch",
        "enforce-eager enable-prefix-caching enable-chunked-prefill language-model-only",
    ),
)

_WITHOUT_EFFECT = (
    *_flags(
        "value",
        """
        tokenizer tokenizer-mode seed allowed-local-media-path code-revision tokenizer-revision max-logprobs
        logprobs-mode config-format hf-token logits-processor-pattern generation-config override-generation-config
        model-impl load-format download-dir safetensors-load-strategy model-loader-extra-config ignore-patterns
        pt-load-map-location guided-decoding-backend structured-outputs-config reasoning-parser
        reasoning-parser-plugin reasoning-config distributed-executor-backend master-addr master-port node-rank
        data-parallel-rank data-parallel-start-rank data-parallel-size-local data-parallel-address
        data-parallel-rpc-port data-parallel-backend all2all-backend eplb-config expert-placement-strategy
        max-parallel-loading-workers worker-cls worker-extension-cls swap-space prefix-caching-hash-algo
        kv-offloading-size kv-offloading-backend kv-cache-memory-bytes media-io-kwargs mm-processor-kwargs
        mm-processor-cache-gb mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-encoder-tp-mode
        mm-encoder-attn-backend video-pruning-rate max-loras max-lora-rank lora-dtype max-cpu-loras
        lora-extra-vocab-size show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces
        kv-cache-metrics-sample max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold
        scheduling-policy scheduler-cls stream-interval scheduler-delay-factor preemption-mode
        max-cudagraph-capture-size max-seq-len-to-capture kv-events-config compilation-config attention-config
        attention-backend additional-config profiler-config optimization-level weight-transfer-config
        io-processor-plugin pooler-config override-pooler-config device host port uds
        uvicorn-log-level chat-template chat-template-content-format default-chat-template-kwargs response-role
        tool-call-parser tool-parser-plugin tool-server log-config-file max-log-len ssl-keyfile ssl-certfile
        ssl-ca-certs ssl-cert-reqs ssl-ciphers root-path api-server-count middleware
        allowed-origins allowed-methods allowed-headers disable-access-log-for-endpoints fingerprint-mode
        fingerprint-value h11-max-incomplete-event-size h11-max-header-count mamba-cache-dtype
        mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode weights-load-device speculative-model
        """,
    ),
    *_flags(
        "switch",
        """
        trust-remote-code allow-deprecated-quantization disable-cascade-attn skip-tokenizer-init
        enable-prompt-embeds enable-sleep-mode enable-return-routed-experts use-tqdm-on-load
        data-parallel-hybrid-lb data-parallel-external-lb disable-nccl-for-dp-synchronization
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
        """,
    ),
    *_flags(
        "values", "api-key allowed-media-domains cudagraph-capture-sizes cuda-graph-sizes logits-processors"
    ),
)

FLAGS: Mapping[str, Flag] = MappingProxyType(
    {flag.name: flag for flag in (*_TAKEN, *_REFUSED, *_WITHOUT_EFFECT)}
)

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


def find_flag(name: str) -> Flag | None:
    """Returns the flag of a name without dashes in front, or of an unambiguous beginning of one (argparse's rule)."""
    if name in FLAGS:
        return FLAGS[name]
    longer = [flag for known, flag in FLAGS.items() if known.startswith(name)]
    return longer[0] if len(longer) == 1 and len(name) > 2 else None


def nearest_flag(name: str) -> str | None:
    """Returns the known flag whose name is most like `name`; None where none is."""
    close = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.75)
    return close[0] if close else None
