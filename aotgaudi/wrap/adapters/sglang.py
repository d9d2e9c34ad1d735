"""SGLang: how to read its command, where its caches lie, and what a warm start shows.

Everything here is read from the sources of release 0.5.23; nothing has run on a GPU. Sources: ``launch_server.py``,
``cli/main.py``, ``srt/arg_groups/fields/*.py`` (flags), ``srt/environ.py`` (caches, variables),
``srt/layers/deep_gemm_wrapper/compile_utils.py``, ``srt/entrypoints/engine.py`` (processes), ``srt/plugins/__init__.py``.

SGLang's kernels for hyper-connections depend on the number of tokens of a step (`aotgaudi.bucketing.mhc_splits`). That
number decides how many partial sums a kernel has, and each number of partial sums is another kernel. A manifest lists one
token count for each. A prompt of exactly that many tokens makes such a step, provided that it shares no prefix with another
prompt (the prefix cache would take the prefix away).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import JsonValue

from aotgaudi.bundle.launch import Launch
from aotgaudi.commands.variables import VariableRules, by_name
from aotgaudi.commands.words import Arity, CommandReader, one_integer, one_text
from aotgaudi.errors import SpecError, shown
from aotgaudi.wrap.adapters.base import (
    Address,
    Flags,
    Phase,
    ServerKind,
    Shapes,
    captures_graphs,
    no_shapes,
    with_agent,
)
from aotgaudi.wrap.adapters.vllm import ANY_ADDRESS, KINDS, LEFT_OUT, LIBRARY_ROOTS
from aotgaudi.wrap.exercise import (
    NUM_TOKEN_IDS,
    Feature,
    ServerLimits,
    completion,
    generation,
    pooling,
    token_prompt,
)
from aotgaudi.wrap.launch_machine import Device, Installed, device_of, find_target
from aotgaudi.wrap.starts import find_sglang

if TYPE_CHECKING:
    from aotgaudi.spec.build_spec import BuildSpec

WHERE = "the SGLang command"
PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"
"""Whether SGLang compiles DeepGEMM's kernels for every number of tokens at start (compile_utils.py)."""

ROOTS: Mapping[str, str] = {
    "SGLANG_CACHE_DIR": "cache/sglang",
    "SGLANG_DG_CACHE_DIR": "cache/sglang/deep_gemm",
    "SGLANG_CUTE_AOT_CACHE_DIR": "cache/sglang/cute_aot",
    "SGLANG_JIT_CACHE_DIR": "cache/sglang/jit",
    **LIBRARY_ROOTS,
}
"""Cache variables -> where the caches lie below a sandbox's root (environ.py ``third_party_cache_defaults``). SGLang derives
DG_JIT_CACHE_DIR from SGLANG_DG_CACHE_DIR."""

_VALUES = """
    model-path revision download-dir served-model-name host port context-length max-running-requests chunked-prefill-size
    tp-size pp-size dp-size attn-dp-size nnodes config api-key admin-api-key disaggregation-mode tokenizer-worker-num
    """
_SWITCHES = "enable-dp-attention use-ray smg-grpc-mode grpc-mode encoder-only trust-remote-code is-embedding"
_ARITIES: Mapping[str, Arity] = {
    **dict.fromkeys(_VALUES.split(), "value"),
    **dict.fromkeys(_SWITCHES.split(), "switch"),
}
_SHORT: Mapping[str, str] = {
    "--model": "model-path",
    "--tp": "tp-size",
    "--tensor-parallel-size": "tp-size",
    "--pp": "pp-size",
    "--pipeline-parallel-size": "pp-size",
    "--dp": "dp-size",
    "--data-parallel-size": "dp-size",
    "--attention-data-parallel-size": "attn-dp-size",
}
"""Other names of flags. Every word of an SGLang command belongs to a flag, so we need not know the arity of other flags."""

_GENERATED = 1
"""Tokens that each request for a shape generates."""

_READER = CommandReader(_ARITIES, _SHORT, acted_on=frozenset(_ARITIES))

CHUNK = "chunked-prefill-size"
"""The flag that bounds the tokens of a step. It counts, because SGLang's default depends on the device's memory."""

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
NEUTRAL_FLAGS: Mapping[str, str] = MappingProxyType(dict(by_name(_FLAGS)))

_NOT_ASKED: Mapping[str, str] = {
    "lora-paths": "LoRA adapters",
    "speculative-algorithm": "speculative decoding",
    "tool-call-parser": "tools",
    "enable-multimodal": "images",
}
"""Flags -> features that we do not know how to request."""

_VARIABLES: Mapping[str, str] = {
    "where files are kept; set below the sandbox's root": """
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
NEUTRAL_VARIABLES: Mapping[str, str] = MappingProxyType(dict(by_name(_VARIABLES)))


def read(words: Sequence[str], environ: Mapping[str, str]) -> Flags:
    """Reads the words after what starts the server. Raises SpecError."""
    read = _READER.read(words)
    flags = read.flags()
    model = one_text(flags, "model-path") or (read.positional[0] if read.positional else "")
    if not model or len(read.positional) > 1:
        problem = f"has {shown(read.positional[-1])}" if read.positional else "names no model"
        raise SpecError(WHERE, problem, "--model-path MODEL, a directory or a name on the hub")
    key = one_text(read.secrets(), "api-key")
    host = one_text(flags, "host")
    context = one_integer(flags, "context-length", 0, minimum=0)
    running = one_integer(flags, "max-running-requests", 0, minimum=0)
    chunk = one_text(flags, CHUNK)
    return Flags(
        values=flags,
        model=model,
        words=read.public_words(),
        address=Address(
            host=ANY_ADDRESS.get(host, host),
            port=one_integer(flags, "port", 30000),
            served_name=one_text(flags, "served-model-name") or model,
            authorization=f"Bearer {key}" if key else "",
        ),
        world={
            "tensor_parallel": one_integer(flags, "tp-size", 1),
            "pipeline_parallel": one_integer(flags, "pp-size", 1),
            "data_parallel": one_integer(flags, "dp-size", 1),
            "nodes": one_integer(flags, "nnodes", 1),
        },
        room=ServerLimits(
            max_model_len=context or None,
            max_num_seqs=running or None,
            max_num_batched_tokens=int(chunk) if chunk.isdigit() else None,  # -1: prompts are not cut.
        ),
    )


def _features(flags: Flags, config: Mapping[str, JsonValue], device: Device) -> tuple[Feature, ...]:
    is_embedding = flags.values.get("is-embedding", False) is not False
    found = pooling("embed", flags.room) if is_embedding else generation(flags.room)
    own = "--exercise FILE can ask for it"
    return (
        *found,
        *(Feature(name, gap=own) for flag, name in _NOT_ASKED.items() if flag in flags.values),
    )


def _refuse(flags: Flags, environ: Mapping[str, str]) -> None:
    """Raises SpecError for servers without HTTP, and for disaggregated servers."""
    if one_text(flags.values, "disaggregation-mode", "null") != "null":
        remedy = "it computes prompts or tokens alone, and answers nothing by itself"
        raise SpecError("--disaggregation-mode", "cannot be wrapped", remedy)
    if one_integer(flags.values, "tokenizer-worker-num", 1) > 1:
        remedy = "1: which of several answers the exercise is not known"
        raise SpecError("--tokenizer-worker-num", "is more than 1", remedy)
    for name in flags.values:
        if name.startswith("ssl-"):
            raise SpecError(f"--{name}", "cannot be wrapped", "it is asked over HTTP, from this machine")


def _settings(root: Path, phase: Phase, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables of a phase.

    A build compiles DeepGEMM's kernels for every number of tokens. A start from captured files skips that: the captured set
    is the mark of completeness that sgl-project/sglang#32124 asks for, and the proof shows that the set is enough. A step
    then begins by loading what it needs.
    """
    plugins = environ.get("SGLANG_PLUGINS", "")
    return {
        PRECOMPILE: "1" if phase == "cold" else "0",
        "SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE": None,
        **(with_agent("SGLANG_PLUGINS", plugins) if plugins else {}),
    }


def _roles(launch: Launch) -> dict[str, int]:
    """Returns how many processes of each role must check in: the server, and a scheduler for each rank.

    Each rank of data parallelism has its own scheduler, unless only the attention is replicated (engine.py).
    """
    world = launch.world
    ranks = world["tensor_parallel"] * world["pipeline_parallel"]
    is_within = launch.flags.get("enable-dp-attention", False) or "attn-dp-size" in launch.flags
    return {"APIServer": 1, "Worker": ranks if is_within else ranks * world["data_parallel"]}


def _build_steps(launch: Launch) -> tuple[tuple[str, ...], ...]:
    """Returns the command of SGLang's DeepGEMM compiler with the server's flags, if there is a device for it.

    It asks for completions (compile_deep_gemm.py), which a server of embeddings refuses.
    """
    found, has_texts = find_sglang(launch.words), "is-embedding" not in launch.flags
    if launch.target.backend != "cuda" or found is None or not has_texts or not _has_deep_gemm(launch):
        return ()
    python = f"{launch.place.prefix}/bin/python"
    return ((python, "-m", "sglang.compile_deep_gemm", *launch.words[found[1] :]),)


def _shapes(spec: BuildSpec, flags: Flags, environ: Mapping[str, str], installed: Installed | None) -> Shapes:
    """Returns the requests for the hyper-connections of `spec`, and the flag that bounds a step's tokens.

    Raises SpecError if the spec has no hyper-connections, or if the command allows other steps than the spec.
    """
    from aotgaudi.manifest.manifest import Manifest  # Only here: `aotgaudi run` needs no manifest.

    manifest = Manifest.of(spec)
    counts = sorted({int(entry.row()[0]) for entry in manifest.of_kind("mhc")})
    if not counts:
        raise no_shapes("sglang with a model without hyper-connections")
    most, room, ranks = counts[-1], flags.room.max_model_len, _dividing_ranks(flags)
    given = one_integer(flags.values, CHUNK, most * ranks)
    if given // ranks != most:
        shared = f", which {ranks} ranks divide" if ranks > 1 else ""
        problem = f"is {given}{shared}, and the spec's largest step has {most} tokens"
        raise SpecError(f"--{CHUNK}", problem, f"{most * ranks}, or another spec")
    if room is not None and most + _GENERATED > room:
        problem = f"is {room}: a step of {most} tokens is no single prompt, and so cannot be asked for"
        raise SpecError("--context-length", problem, f"at least {most + _GENERATED}")
    if len(counts) > NUM_TOKEN_IDS:
        raise SpecError("mhc", f"gives {len(counts)} token counts", f"at most {NUM_TOKEN_IDS}")
    return Shapes(
        manifest_id=manifest.id,
        words=() if CHUNK in flags.values else (f"--{CHUNK}", str(most * ranks)),
        requests=tuple(
            completion(f"{num_tokens} tokens", prompt=token_prompt(num_tokens, first), max_tokens=_GENERATED)
            for first, num_tokens in enumerate(counts)
        ),
    )


SGLANG = ServerKind(
    name="sglang",
    starts_at=find_sglang,
    reader=_READER,
    model_flag="model-path",
    read=read,
    neutral_flags=NEUTRAL_FLAGS,
    defaults=lambda _: dict.fromkeys(("tp-size", "pp-size", "dp-size", "nnodes"), "1"),
    refuse=_refuse,
    variable_rules=VariableRules(("SGLANG_", "SGL_"), NEUTRAL_VARIABLES, {}),
    cache_roots=ROOTS,
    settings=_settings,
    left_out=(*LEFT_OUT, ("cache/sglang/deep_gemm/tmp/*", "kernels that were being compiled")),
    kinds=KINDS,
    repairs=(),
    hooks=("audit",),
    counted=(),
    zeros=(),
    device=device_of,
    target=lambda installed: find_target(device_of(installed)),
    roles=_roles,
    features=_features,
    residuals=captures_graphs("disable-cuda-graph"),
    build_steps=_build_steps,
    shape_names=frozenset({CHUNK}),
    make_shapes=_shapes,
)


def _dividing_ranks(flags: Flags) -> int:
    """Returns by how much SGLang divides --chunked-prefill-size: with DP attention that is for all data-parallel ranks.

    Source: server_args.py ``_handle_data_parallelism``. Raises SpecError for ``--attn-dp-size``.
    """
    if "attn-dp-size" in flags.values:
        raise SpecError(
            "--attn-dp-size",
            f"is given, and how it divides --{CHUNK} is not known",
            "no --shapes, or --dp-size with --enable-dp-attention",
        )
    return flags.world["data_parallel"] if flags.values.get("enable-dp-attention", False) is not False else 1


def _has_deep_gemm(launch: Launch) -> bool:
    return any(name in launch.software for name in ("deep-gemm", "deepgemm", "sgl-kernel", "sglang-kernel"))
