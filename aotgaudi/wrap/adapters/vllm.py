"""vLLM: how to read its command, where its caches lie, what a warm start shows, and which defects the agent repairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from aotgaudi.bundle.capture_receipt import FileKind
from aotgaudi.bundle.launch import API_SERVERS, GuestName, Launch
from aotgaudi.commands.flags import (
    CONDITIONS,
    CPU_DEFAULTS,
    DEFAULTS,
    FLAGS,
    MEMORY_FLAGS,
    NEUTRAL_FLAGS,
    NEUTRAL_VARIABLES,
    SHORT_FLAGS,
)
from aotgaudi.commands.starts import find_vllm
from aotgaudi.commands.variables import VariableRules
from aotgaudi.commands.words import CommandReader, CommandWords, one_integer, one_text, parse_tokens
from aotgaudi.errors import SpecError, shown
from aotgaudi.gaudi.live_graphs import DEFAULT_MAX_LOGPROBS
from aotgaudi.wrap.adapters.base import (
    Address,
    Flags,
    Phase,
    Repair,
    ServerKind,
    captures_graphs,
    with_agent,
)
from aotgaudi.wrap.exercise import (
    Feature,
    ServerLimits,
    adapter_names,
    adapters,
    generation,
    pooling,
    pooling_kind,
    requests_of,
    token_prompt,
)
from aotgaudi.wrap.launch_machine import Device, Installed, device_of, find_target

FINALIZE_LOADING = Repair(
    id="vllm.finalize-loading",
    defect=(
        "On a CPU the saved artifact is torch's own bundled callable. After loading it vLLM calls its finalize_loading,"
        " a method that only vLLM's own kind of artifact has; the AttributeError is caught, and all is generated again."
    ),
    feature="torch._dynamo.aot_compile_types.BundledAOTAutogradSerializableCallable has no finalize_loading of its own",
    action="gives that class a finalize_loading that does nothing: the artifact is complete once it is deserialised",
    upstream="vllm/compilation/decorators.py, since vllm-project/vllm#36098",
)

REPAIRS = (FINALIZE_LOADING,)


WHERE = "the vLLM command"

LIBRARY_ROOTS: Mapping[str, str] = {
    "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "TRITON_CACHE_DIR": "cache/triton",
    "TORCH_EXTENSIONS_DIR": "cache/torch_extensions",
    "CUDA_CACHE_PATH": "cache/cuda",
    "FLASHINFER_WORKSPACE_BASE": "cache/flashinfer",
    "TVM_FFI_CACHE_DIR": "cache/tvm_ffi",
    "TILELANG_CACHE_DIR": "cache/tilelang",
    "CUTE_DSL_CACHE_DIR": "cache/cute_dsl",
    "TMPDIR": "tmp",
}
"""Cache variables of the compilers that every server uses -> where the caches lie below a sandbox's root."""

ROOTS: Mapping[str, str] = {
    "VLLM_CACHE_ROOT": "cache/vllm",
    **LIBRARY_ROOTS,
    "AITER_JIT_DIR": "cache/aiter",
}
"""Cache variables -> where the caches lie below a sandbox's root. vLLM keeps the choices of DeepGEMM and FlashInfer in its
own cache."""

LEFT_OUT = (
    ("*.lock", "locks, which are made again"),
    ("*/locks/*", "locks, which are made again"),
    ("*.tmp", "being written"),
    ("*.pyc", "bytecode, which holds times"),
    ("*/__pycache__/*", "bytecode, which holds times"),
    ("tmp/vllm_dist_*", "a meeting place of processes"),
    ("tmp/torch-*", "a socket of a run"),
    ("home/.config/vllm/*", "usage statistics"),
    ("home/.cache/huggingface/*", "the model, which is no cache of code"),
)
KINDS: tuple[tuple[str, FileKind], ...] = (
    *((pattern, "pickle") for pattern in ("*/fxgraph/*", "*/aotautograd/*", "*/model", "*/*[!/].pkl")),
    ("*/*[!/].so", "library"),
    ("*/*[!/].py", "python"),
    ("*/*[!/].json", "json"),
    *((pattern, "cubin") for pattern in ("*/*[!/].cubin", "*/*[!/].hsaco")),
)
"""Patterns of captured paths -> what such a file is, for every server that compiles with torch."""
_REFUSED_VARIABLES: Mapping[str, str] = {
    "VLLM_DISABLE_COMPILE_CACHE": "nothing is kept that could be captured or loaded",
    "VLLM_USE_RUST_FRONTEND": "the front end is a process that loads no plugin, so nothing of it can be watched",
}
_ACTED_ON = """
    model revision download-dir served-model-name config max-model-len max-num-seqs
    host port uds headless api-server-count ssl-certfile ssl-cert-reqs
    tensor-parallel-size pipeline-parallel-size data-parallel-size data-parallel-size-local nnodes
    distributed-executor-backend data-parallel-backend
    """
ACTED_ON = frozenset(_ACTED_ON.split())
"""Flags whose values we act on."""

_DRAFTED = ("speculative-config", "spec-method", "spec-model", "speculative-model")
_REFUSED_WITH_DRAFTS = ("min_p", "logit_bias")
"""Parameters that vLLM answers with 400 if it drafts tokens (``_validate_spec_decode`` in vllm/sampling_params.py)."""
_FATAL_WITH_DRAFTS: Mapping[str, str] = {"top_k": "top_k ends a vLLM 0.32 that drafts on a CPU"}
"""Parameters that crash a vLLM that drafts tokens on a CPU.

``_expand_kernel_impl`` in vllm/utils/cpu_triton_utils.py writes to a copy and leaves its output uninitialized.
"""
_SERVER_IS_CHOSEN = (
    "chance decides which API server prepares an input, and some models' processors are compiled there"
)
"""Processors of Nemotron Nano VL, Cohere ASR, Kimi K2.5 and Inkling in vllm/transformers_utils/processors, release 0.32."""
_OWN = "--exercise FILE can ask for it"
_RANK_IS_CHOSEN = "vLLM alone chooses which rank computes a request that generates no text"
_NOT_ASKED: Mapping[str, str] = {"audio_config": "audio", "video_config": "videos"}
"""Keys of a model's configuration -> inputs that we do not know how to request."""
_NOT_ASKED_FLAGS: Mapping[str, str] = {
    "enable-prompt-embeds": "prompts that are embeddings",
    "enable-sleep-mode": "the time after a sleep",
}
_CERTIFICATE_REQUIRED = "2"
"""``ssl.CERT_REQUIRED``, of the client."""
_READER = CommandReader({name: flag.arity for name, flag in FLAGS.items()}, SHORT_FLAGS, acted_on=ACTED_ON)
ANY_ADDRESS: Mapping[str, str] = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104, not bound to


def read(words: Sequence[str], environ: Mapping[str, str]) -> Flags:
    """Reads the words after what starts the server. Raises SpecError."""
    read = _READER.read(words)
    flags = read.flags()
    model = read.one_model(WHERE)
    host = one_text(flags, "host")
    ranks = one_integer(flags, "data-parallel-size", 1)
    return Flags(
        values=flags,
        model=model,
        words=read.public_words(),
        address=Address(
            host=ANY_ADDRESS.get(host, host),
            port=one_integer(flags, "port", 8000),
            uds=one_text(flags, "uds") or None,
            served_name=one_text(flags, "served-model-name") or model,
            authorization=_authorization(read, environ),
            certificate=one_text(flags, "ssl-certfile") or None,
            ranks=ranks,
        ),
        world={
            "tensor_parallel": one_integer(flags, "tensor-parallel-size", 1),
            "pipeline_parallel": one_integer(flags, "pipeline-parallel-size", 1),
            "data_parallel": ranks,
            "nodes": one_integer(flags, "nnodes", 1),
            API_SERVERS: one_integer(flags, "api-server-count", ranks),  # vllm/entrypoints/cli/serve.py
        },
        room=ServerLimits(
            max_model_len=_tokens(flags, "max-model-len"),
            max_num_seqs=_tokens(flags, "max-num-seqs"),
            max_num_batched_tokens=_tokens(flags, "max-num-batched-tokens"),
            max_logprobs=None if max_logprobs(flags) < 0 else max_logprobs(flags),
        ),
    )


def _features(flags: Flags, config: Mapping[str, JsonValue], device: Device) -> tuple[Feature, ...]:
    values = flags.values
    kind = pooling_kind(values, config)
    is_drafting = any(_is_on(values, name) for name in _DRAFTED)
    refused = _REFUSED_WITH_DRAFTS if is_drafting else ()
    fatal = _FATAL_WITH_DRAFTS if is_drafting and device == "cpu" else {}
    found = [*(pooling(kind, flags.room) if kind else generation(flags.room, refused, fatal))]
    if kind and flags.world["data_parallel"] > 1:
        found.append(Feature("each data-parallel rank", gap=_RANK_IS_CHOSEN))
    if _is_on(values, "enable-lora"):
        found.append(adapters(adapter_names(values.get("lora-modules", []))))
    if is_drafting:
        name, repetition = "speculative decoding", token_prompt(6) * 6  # So that drafts are accepted.
        found.append(Feature(name, requests_of(name, {"repetition": repetition})))
    if _is_on(values, "enable-auto-tool-choice"):
        found.append(Feature("tools", requests_of("tools")))
    is_text = _is_on(values, "language-model-only")
    if "vision_config" in config and not is_text:
        found.append(Feature("images", requests_of("images"), "sizes other than 56 x 56 and 224 x 112"))
    found += [Feature(name, gap=_OWN) for key, name in _NOT_ASKED.items() if key in config and not is_text]
    has_inputs = "vision_config" in config or not _NOT_ASKED.keys().isdisjoint(config)
    if has_inputs and not is_text and flags.world[API_SERVERS] > 1:
        found.append(Feature("images and sounds on each API server", gap=_SERVER_IS_CHOSEN))
    found += [Feature(name, gap=_OWN) for flag, name in _NOT_ASKED_FLAGS.items() if _is_on(values, flag)]
    return tuple(found)


def refuse(flags: Flags, environ: Mapping[str, str]) -> None:
    """Raises SpecError for processes that we do not see, for clients that need a certificate, and if no cache is kept."""
    for name, reason in _REFUSED_VARIABLES.items():
        if environ.get(name, "0").lower() not in ("", "0", "false"):
            raise SpecError(name, f"is {shown(environ[name])}", reason)
    for name in ("distributed-executor-backend", "data-parallel-backend"):
        if one_text(flags.values, name) == "ray":
            raise SpecError(f"--{name}", "is ray", "Ray's processes cannot be watched from here: mp")
    ranks = flags.world["data_parallel"]
    size = environ.get("VLLM_DP_SIZE", "1") if ranks == 1 else "1"  # As in vllm/config/parallel.py.
    if size != "1":
        remedy = "--data-parallel-size: the variable is for engines that somebody else starts, one a rank"
        raise SpecError("VLLM_DP_SIZE", f"is {shown(size)}", remedy)
    here = one_integer(flags.values, "data-parallel-size-local", ranks, minimum=0)
    if here != ranks:
        remedy = f"{ranks}, as --data-parallel-size: ranks on other machines cannot be watched from here"
        raise SpecError("--data-parallel-size-local", f"is {here}", remedy)
    if one_text(flags.values, "ssl-cert-reqs", "0") == _CERTIFICATE_REQUIRED:
        remedy = "0 or 1: the exercise and the health probe have no certificate of a client"
        raise SpecError("--ssl-cert-reqs", f"is {_CERTIFICATE_REQUIRED}", remedy)


def settings(root: Path, phase: Phase, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables of a phase.

    Headers are not precompiled: torch keeps them, 150 MB each, outside its cache, and looks for them before it looks into
    the cache (torch/_inductor/codecache.py). In a start from sealed files, vLLM must fail instead of silently compiling
    again.
    """
    plugins = environ.get("VLLM_PLUGINS")
    return {
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "VLLM_FORCE_AOT_LOAD": None if phase in ("cold", "measure") else "1",
        **({} if plugins is None else with_agent("VLLM_PLUGINS", plugins)),
    }


def _roles(launch: Launch) -> dict[str, int]:
    """Returns how many processes of each role must check in.

    On a CPU, and with several ranks, each rank is a process (vllm/v1/executor/multiproc_executor.py). A single rank on a GPU
    runs in the engine's process. Several API servers are started by a process that is none, but looks like one to its agent.
    A coordinator counts the requests of data-parallel ranks (vllm/v1/engine/coordinator.py).
    """
    ranks = launch.world["tensor_parallel"] * launch.world["pipeline_parallel"]
    engines = launch.world["data_parallel"]
    is_in_engine = launch.flags.get("distributed-executor-backend") == "uni" or (
        launch.target.backend != "cpu" and ranks == 1
    )
    servers = launch.world.get(API_SERVERS, 1)
    roles = {"APIServer": servers + (servers > 1), "EngineCore": engines}
    if engines > 1:
        roles["DPCoordinator"] = 1
    return roles if is_in_engine else {**roles, "Worker": ranks * engines}


def _variant(installed: Installed) -> GuestName | None:
    """Returns the kind of vLLM for Gaudi, as a plugin or as a fork; None for vLLM itself.

    The fork (HabanaAI/vllm-fork, of Gaudi 1.22's README) has its buckets in a separate package, ``vllm-hpu-extension``, and
    names Gaudi in its local version: 0.9.0.1+gaudi.1.22.0.
    """
    is_plugin = not {"vllm-gaudi", "vllm-hpu-extension"}.isdisjoint(installed.names)
    is_fork = "gaudi" in installed.distributions.get("vllm", "").partition("+")[2]
    return "vllm-gaudi" if is_plugin or is_fork else None


VLLM = ServerKind(
    name="vllm",
    starts_at=find_vllm,
    reader=_READER,
    model_flag="model",
    read=read,
    neutral_flags={**NEUTRAL_FLAGS, **MEMORY_FLAGS},
    defaults=lambda device: CPU_DEFAULTS if device == "cpu" else DEFAULTS,
    refuse=refuse,
    variable_rules=VariableRules(("VLLM_", "MOONCAKE_", "INKLING_"), NEUTRAL_VARIABLES, CONDITIONS),
    cache_roots=ROOTS,
    settings=settings,
    left_out=LEFT_OUT,
    kinds=KINDS,
    repairs=REPAIRS,
    hooks=("audit", "torch.codegen", "vllm.counters"),
    counted=("vllm.num_aot_artifacts_loaded", "vllm.num_compiled_artifacts_loaded"),
    zeros=("vllm.num_aot_compiles", "vllm.num_aot_artifacts_saved", "vllm.num_inductor_compiles"),
    device=device_of,
    target=lambda installed: find_target(device_of(installed)),
    roles=_roles,
    features=_features,
    residuals=captures_graphs("enforce-eager"),
    variant=_variant,
)
"""vLLM with its own devices: a CPU, CUDA or ROCm."""


def _is_on(values: Mapping[str, JsonValue], name: str) -> bool:
    return values.get(name, False) is not False


def _authorization(read: CommandWords, environ: Mapping[str, str]) -> str:
    """Returns the header that vLLM requires (vllm/entrypoints/serve/utils/server_utils.py). Any of its keys will do."""
    key = one_text(read.secrets(), "api-key") or environ.get("VLLM_API_KEY", "")
    return f"Bearer {key}" if key else ""


def max_logprobs(flags: Mapping[str, JsonValue]) -> int:
    """Returns how many log-probabilities a request may ask for; -1 for no bound. Raises SpecError."""
    if one_text(flags, "max-logprobs") == "-1":
        return -1
    return one_integer(flags, "max-logprobs", DEFAULT_MAX_LOGPROBS, minimum=0)


def _tokens(flags: Mapping[str, JsonValue], name: str) -> int | None:
    """Returns a number of tokens or sequences; None if the command leaves the choice to vLLM, as ``auto`` does."""
    try:
        return parse_tokens(f"--{name}", one_text(flags, name))
    except SpecError:
        return None
