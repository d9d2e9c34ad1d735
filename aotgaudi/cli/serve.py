"""``aotgaudi serve``: serves a bundle and a model directory with the OpenAI API."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from aotgaudi.cli.config_file import config_option
from aotgaudi.cli.options import (
    LOG_FORMAT,
    POSITIVE,
    FiniteRange,
    acceptance_options,
    find_model,
    option,
    options_of,
    parse_byte_count,
    said,
)
from aotgaudi.engine.limits import AdmissionLimits
from aotgaudi.errors import MissingPackageError
from aotgaudi.machine import Threads, bound_spinning, choose_threads
from aotgaudi.server.options import (
    Access,
    Listening,
    LogFormat,
    Observability,
    ReplyParsers,
    StopTimes,
    TlsFiles,
    digests_of,
    read_key_digests,
)
from aotgaudi.spec.policy import Policy

if TYPE_CHECKING:
    from aotgaudi.bundle.trust import TrustPolicy
    from aotgaudi.phases import Phases
    from aotgaudi.server.engine.start import EngineProcess

Seccomp = Literal["auto", "require", "off"]
"""As in `aotgaudi.runtime.guard`, which imports too much for a help text."""

_SERVE = {"torch": "serve", "tokenizers": "serve", "uvicorn": "serve"}
_OTEL = {
    "opentelemetry.sdk": "otel",
    "opentelemetry.exporter.otlp.proto.http": "otel",
    "opentelemetry.instrumentation.asgi": "otel",
}
"""The modules that `_require_packages` looks for, with the extra that brings them."""

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*/?", re.ASCII)
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
"""The sources of settings that a person has written for this command."""
_SEALED = "limits are sealed in the bundle; build again with another"

_NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        "--ssl-keyfile-password": "every user of the machine could read it; give a key without a password",
        "--ssl-ca-certs": "clients show API keys, not certificates; a proxy in front of the server can ask for these",
        "--ssl-cert-reqs": "clients show API keys, not certificates; a proxy in front of the server can ask for these",
        "--tensor-parallel-size": "a model runs on one device",
        "--pipeline-parallel-size": "a model runs on one device",
        "--enable-lora": "adapters are not served",
        "--max-model-len": f"{_SEALED} limits.max_model_len",
        "--max-num-seqs": f"{_SEALED} limits.max_num_seqs",
        "--max-num-batched-tokens": f"{_SEALED} limits.max_num_batched_tokens",
        **dict.fromkeys(
            ("--allowed-methods", "--allowed-headers"), "pages of --allowed-origins may use and send any"
        ),
        "--allow-credentials": "pages send API keys, not cookies; a proxy in front of the server can allow these",
        **dict.fromkeys(
            ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override"),
            "--kv-cache-memory 4GiB says what the KV cache takes",
        ),
    }
)
"""Options of vLLM's server that users try -> what to do instead."""


def _parse_override(text: str) -> Mapping[str, Any]:
    from aotgaudi.llm.model_files import SAMPLING_DEFAULTS

    try:
        override = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(override, dict):
        raise ValueError("must be a JSON object")
    for name in override:
        if name not in SAMPLING_DEFAULTS:
            raise ValueError(f"has {name!r}; the sampling defaults are {', '.join(SAMPLING_DEFAULTS)}")
    return override


@dataclass(frozen=True, kw_only=True)
class _Serving:
    """What to serve from a bundle of programs, and how."""

    model: str | None = option("Model directory (or hub id): config, weights, tokenizer.", metavar="DIR")
    served_model_names: tuple[str, ...] = option(
        "Name in the API (repeatable)  [default: the directory's name]",
        "--served-model-name",
        default=(),
        metavar="NAME",
    )
    generation_config: str = option(
        "Sampling defaults: auto (the model's generation_config.json), vllm (none), or a directory.",
        default="auto",
        metavar="SOURCE",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        "Sampling defaults that win over the file's, e.g. '{\"temperature\": 0.6}'.",
        parse=_parse_override,
        metavar="JSON",
    )
    chat_template: Path | None = option(
        "Chat template (Jinja) to use in place of the model's.", metavar="FILE"
    )
    allow_unbound_model: bool = option(
        "With --trusted-key: take a bundle whose signature does not cover the model directory.", default=False
    )
    prefix_caching: bool | None = option(
        "Whether prompts start after what is cached of them  [default: as the bundle's spec says, which is yes]",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    )
    kv_cache_memory: int | None = option(
        "Memory of the KV cache, e.g. 4GiB  [default: of limits.num_blocks of the bundle's spec]",
        parse=parse_byte_count,
        metavar="SIZE",
    )
    policy: Policy | None = option(
        "How prompts and decodes take turns: even streams, or full steps  [default: as the bundle's spec says]",
    )
    seccomp: Seccomp = option(
        "With --require-warm: have the kernel refuse to start processes, once ready.", default="auto"
    )
    drain_delay: float = option(
        "How long to answer 503 after SIGTERM, before the socket closes.",
        default=5.0,
        type=FiniteRange(min=0),
        metavar="SECONDS",
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the API."""
        return self.served_model_names or (served_name(self.given_model),)

    @property
    def given_model(self) -> str:
        """The given model. Raises UsageError if there is none."""
        if self.model is None:
            raise click.UsageError("Missing option '--model'.")
        return self.model

    def check(self, *, require_warm: bool) -> None:
        """Raises UsageError for options that contradict each other."""
        _ = self.given_model
        if self.seccomp == "require" and not require_warm:
            raise click.UsageError("--seccomp require goes with --require-warm: else there is no guard")


def served_name(model: str) -> str:
    """Returns the name in the API: a hub id as given, else the directory's name (for a link, the link's own)."""
    return Path(os.path.abspath(model)).name if Path(model).exists() else model


def _require_packages(extras: Mapping[str, str] = _SERVE) -> None:
    """Raises MissingPackageError if a package of an extra is missing, before another process finds out."""
    for package, extra in extras.items():
        try:
            is_there = find_spec(package) is not None
        except ModuleNotFoundError:  # The package around it is missing as well.
            is_there = False
        if not is_there:
            raise MissingPackageError(package, extra)


@contextmanager
def _begun_engine(
    choice: _Serving,
    bundle: Path,
    acceptance: TrustPolicy,
    phases: Phases,
    log_format: LogFormat,
    *,
    require_warm: bool,
) -> Iterator[tuple[EngineProcess, Threads]]:
    """Yields the engine process, which has begun to start, and its threads. Ends the process.

    Sets up the log, and disables garbage collection, because the objects of a start stay. The caller enables it again.
    """
    model_dir = find_model(choice.given_model)
    gc.disable()
    from aotgaudi.server.engine.start import EngineProcess

    bound_spinning(os.environ)
    with EngineProcess(phases.clock()) as process:
        from aotgaudi.llm.model_files import GenerationConfig
        from aotgaudi.llm.running import ModelOptions
        from aotgaudi.server.engine.channel import Begin
        from aotgaudi.server.log import log_handler

        threads = choose_threads(os.environ, [process.pid])
        model_options = ModelOptions(
            bundle=bundle,
            acceptance=acceptance,
            model_dir=model_dir,
            require_warm=require_warm,
            num_threads=threads.num,
            allow_unbound_model=choice.allow_unbound_model,
            generation_config=GenerationConfig(
                choice.generation_config, choice.override_generation_config or {}
            ),
            prefix_caching=choice.prefix_caching,
            policy=choice.policy,
            kv_cache_bytes=choice.kv_cache_memory,
        )
        process.begin(Begin(options=model_options, seccomp=choice.seccomp, log_format=log_format))
        logging.basicConfig(level=logging.INFO, handlers=[log_handler(sys.stderr, log_format)])
        logging.captureWarnings(log_format == "json")
        yield process, threads


class _ServeCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in _NOT_YET:
                raise click.UsageError(
                    f"{error.option_name} is not supported: {_NOT_YET[error.option_name]}", ctx
                ) from error
            raise


def _parse_root_path(text: str) -> str:
    if not _ROOT_PATH.fullmatch(text):
        raise ValueError("must be a path such as /llm: letters, digits and ._~- between slashes")
    return text.rstrip("/")


def _parse_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL such as http://collector:4318")
    return text if parts.path.strip("/") else f"{text.rstrip('/')}/v1/traces"


def _check_address(context: click.Context) -> None:
    """Raises UsageError if both a socket file and an address are given. An address in the config file may be overridden."""
    source = context.get_parameter_source("uds")
    if source not in _GIVEN:
        return
    for name in ("host", "port"):
        if context.get_parameter_source(name) in (source, ParameterSource.COMMANDLINE):
            raise click.UsageError(f"--uds listens on a file, not on an address: leave out --{name}")


API_KEY_VARIABLES = ("AOTGAUDI_API_KEY", "VLLM_API_KEY")
"""Includes vLLM's variable, so that a server which has it in its environment is not open to everybody."""


def _listed(text: str) -> tuple[str, ...]:
    """Returns the values of an option: one, or a JSON list, in vLLM's form."""
    if not text.startswith("["):
        return (text,)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not all(isinstance(value, str) for value in values):
        raise ValueError("must be a JSON list of texts")
    return tuple(values)


@dataclass(frozen=True, kw_only=True)
class _Clients:
    api_keys: tuple[str, ...] = option(
        f"Key that requests must carry (repeatable; also from ${', $'.join(API_KEY_VARIABLES)}). Other users of this "
        "machine can read a command line: prefer the file.",
        "--api-key",
        default=(),
        envvar=API_KEY_VARIABLES,
        metavar="KEY",
    )
    api_key_file: Path | None = option("File of such keys, one a line.", metavar="FILE")
    allowed_origins: tuple[str, ...] = option(
        "Origin whose pages may read answers in a browser (repeatable; *).",
        default=(),
        parse=lambda texts: tuple(value for text in texts for value in _listed(text)),
        metavar="ORIGIN",
    )

    def access(self) -> Access:
        """Returns who may send requests. Raises SpecError for an unfit key."""
        digests = digests_of(self.api_keys, "--api-key")
        if self.api_key_file is not None:
            digests += read_key_digests(self.api_key_file)
        return Access(
            key_digests=tuple(dict.fromkeys(digests)),
            allowed_origins=self.allowed_origins,
        )


@click.command(cls=_ServeCommand)
@config_option(_NOT_YET)
@click.option(
    "--bundle", type=click.Path(path_type=Path), required=True, metavar="DIR", help="What `build` sealed."
)
@click.option(
    "--require-warm",
    is_flag=True,
    help="Refuse to start unless the bundle is proved whole and warm; guard against compiling.",
)
@acceptance_options
@options_of(_Serving, "serving")
@options_of(
    Listening,
    "listening",
    host=said("Address to listen on.", default="127.0.0.1"),
    port=said("Port (0: any free one).", type=click.IntRange(0, 65535), default=8000),
    uds=said("Listen on this socket file, and on no address.", metavar="PATH"),
    root_path=said(
        "Where a proxy shows the API, such as /llm; requests may come with this path or without.",
        parse=_parse_root_path,
        metavar="PATH",
    ),
    allowed_hosts=said(
        "Name that requests may use (repeatable; *.example.com; *)  [default: localhost on the loopback, else any]",
        "--allowed-host",
        metavar="NAME",
    ),
)
@options_of(
    TlsFiles,
    "tls_files",
    ssl_certfile=said("Speak HTTPS, with this certificate chain (PEM).", metavar="PEM"),
    ssl_keyfile=said("The certificate's private key  [default: in the same file]", metavar="PEM"),
)
@options_of(
    ReplyParsers,
    "parsers",
    enable_auto_tool_choice=said("Let the model decide whether it calls tools."),
    tool_call_parser=said(
        "How the model writes calls of tools: hermes (Hermes, Qwen), llama3_json (Llama 3), mistral."
    ),
    reasoning_parser=said("Format of the model's reasoning, which is returned in a field of its own."),
)
@options_of(_Clients, "clients")
@options_of(
    AdmissionLimits,
    "admission",
    max_requests=said("How many prompts may wait or run; more get 429.", type=POSITIVE, metavar="N"),
)
@options_of(
    Observability,
    "observability",
    log_format=LOG_FORMAT,
    access_log=said("Log a line for each request, with its tokens and seconds."),
    otlp_traces_endpoint=said(
        "Send a span for each request to this OpenTelemetry collector (OTLP over HTTP, port 4318); needs [otel].",
        parse=_parse_url,
        metavar="URL",
    ),
)
@click.pass_context
def serve(  # noqa: PLR0913 - one argument for each group of options
    context: click.Context,
    *,
    bundle: Path,
    require_warm: bool,
    acceptance: TrustPolicy,
    serving: _Serving,
    listening: Listening,
    tls_files: TlsFiles,
    parsers: ReplyParsers,
    clients: _Clients,
    admission: AdmissionLimits,
    observability: Observability,
) -> None:
    """Serve a model from a verified BUNDLE. With --require-warm it starts warm or not at all."""
    from aotgaudi.bundle.kind import is_capture
    from aotgaudi.phases import Phases, since_process_start

    phases = Phases(since_process_start())
    phases.add("process", 0.0)
    import_began = phases.clock()
    if is_capture(bundle):
        raise click.UsageError(f"{bundle} holds the caches of another server: aotgaudi run --bundle {bundle}")
    serving.check(require_warm=require_warm)
    _check_address(context)
    access, tls = clients.access(), tls_files.context()
    for name in API_KEY_VARIABLES:
        os.environ.pop(name, None)  # No process that the server starts needs it.
    _require_packages()
    if observability.otlp_traces_endpoint is not None:
        _require_packages(_OTEL)
    context.call_on_close(gc.enable)
    with _begun_engine(
        serving, bundle, acceptance, phases, observability.log_format, require_warm=require_warm
    ) as (process, threads):
        from aotgaudi.server.launch import ServeOptions, launch

        phases.add("import", import_began)
        launch(
            ServeOptions(
                require_warm=require_warm,
                threads=threads,
                listening=listening,
                served_model_names=serving.names,
                model_root=serving.given_model,
                admission=admission,
                seccomp=serving.seccomp,
                stop_times=StopTimes(delay=serving.drain_delay),
                observability=observability,
                access=access,
                tls=tls,
                chat_template=serving.chat_template,
                parsers=parsers,
            ),
            process,
            phases,
        )
