"""The flags of ``vllm serve``: which of them a spec takes, which it refuses, and what the others do to what is warm.

Names and arities are those of vllm/engine/arg_utils.py, vllm/entrypoints/openai/cli_args.py, and of vllm-fork's
additions to the former. A flag is `harmless` only with a reason why it changes nothing that is warm; every other flag
that a spec has no place for may change it, and the report says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from aotgaudi.wrap.vllm.flag_reader import Arity

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
