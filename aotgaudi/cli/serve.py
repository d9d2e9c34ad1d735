"""``aotgaudi serve``: serves a bundle and a model directory with the OpenAI API."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from aotgaudi.cli.config_file import config_option
from aotgaudi.cli.options import (
    POSITIVE,
    option,
    options_of,
    said,
)
from aotgaudi.cli.served_model import OTEL, Serving, begun_engine, require_packages
from aotgaudi.cli.serving_options import LOG_FORMAT, acceptance_options
from aotgaudi.engine.limits import AdmissionLimits
from aotgaudi.server.options import (
    DEFAULT_MAX_CONNECTIONS,
    Access,
    Listening,
    Observability,
    ReplyParsers,
    StopTimes,
    TlsFiles,
    digests_of,
    read_key_digests,
)

if TYPE_CHECKING:
    from aotgaudi.bundle.trust import TrustPolicy

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*/?", re.ASCII)
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
"""The sources of settings that a person has written for this command."""
_SEALED = "limits are sealed in the bundle; build again with another"

_NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        "--ssl-keyfile-password": "every user of the machine could read it; use --ssl-keyfile-password-file",
        "--ssl-ca-certs": "clients show API keys, not certificates; a proxy in front of the server can ask for these",
        "--ssl-cert-reqs": "clients show API keys, not certificates; a proxy in front of the server can ask for these",
        "--tensor-parallel-size": "a model runs on one device",
        "--pipeline-parallel-size": "a model runs on one device",
        "--enable-lora": "adapters are not served",
        "--max-model-len": f"{_SEALED} limits.max_model_len",
        "--max-num-seqs": f"{_SEALED} limits.max_num_seqs",
        "--max-num-batched-tokens": f"{_SEALED} limits.max_num_batched_tokens",
        **dict.fromkeys(
            ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override"),
            "--kv-cache-memory 4GiB says what the KV cache takes",
        ),
    }
)
"""Options of vLLM's server that users try -> what to do instead."""


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


def _parse_lists(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(value for text in texts for value in _listed(text))


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
    api_key_file: Path | None = option("File of such keys, one a line.", default=None, metavar="FILE")
    allowed_origins: tuple[str, ...] = option(
        "Origin whose pages may read answers in a browser (repeatable; *).",
        default=(),
        parse=_parse_lists,
        metavar="ORIGIN",
    )
    allowed_methods: tuple[str, ...] = option(
        "Method that these pages may use (repeatable)  [default: all]",
        default=(),
        parse=_parse_lists,
        metavar="METHOD",
    )
    allowed_headers: tuple[str, ...] = option(
        "Header that these pages may send (repeatable)  [default: all]",
        default=(),
        parse=_parse_lists,
        metavar="NAME",
    )
    allow_credentials: bool = option("Let these pages send cookies and the like.", default=False)

    def access(self) -> Access:
        """Returns who may send requests. Raises SpecError for an unfit key, UsageError for CORS without an origin."""
        cors = (self.allowed_methods, self.allowed_headers, self.allow_credentials)
        if any(cors) and not self.allowed_origins:
            raise click.UsageError("options about pages of other origins need --allowed-origins")
        digests = digests_of(self.api_keys, "--api-key")
        if self.api_key_file is not None:
            digests += read_key_digests(self.api_key_file)
        return Access(
            key_digests=tuple(dict.fromkeys(digests)),
            allowed_origins=self.allowed_origins,
            allowed_methods=self.allowed_methods or ("*",),
            allowed_headers=self.allowed_headers or ("*",),
            allow_credentials=self.allow_credentials,
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
@options_of(Serving, "serving")
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
    max_connections=said(
        "Connections at once; while there are more, requests get 503. Slow clients are not closed: put a proxy in front "
        f"(ci/templates/nginx.conf)  [default: {DEFAULT_MAX_CONNECTIONS}, or as many as files may be open]",
        type=POSITIVE,
        metavar="N",
    ),
)
@options_of(
    TlsFiles,
    "tls_files",
    ssl_certfile=said("Speak HTTPS, with this certificate chain (PEM).", metavar="PEM"),
    ssl_keyfile=said("The certificate's private key  [default: in the same file]", metavar="PEM"),
    ssl_keyfile_password_file=said("File with the password of that key.", metavar="FILE"),
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
    max_prompt_tokens=said(
        "How many tokens the prompts of all these may have; more get 429.", type=POSITIVE, metavar="N"
    ),
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
    serving: Serving,
    listening: Listening,
    tls_files: TlsFiles,
    parsers: ReplyParsers,
    clients: _Clients,
    admission: AdmissionLimits,
    observability: Observability,
) -> None:
    """Serve a model from a verified BUNDLE. With --require-warm it starts warm or not at all."""
    from aotgaudi.bundle.format import is_capture
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
    require_packages()
    if observability.otlp_traces_endpoint is not None:
        require_packages(OTEL)
    context.call_on_close(gc.enable)
    with begun_engine(
        serving,
        bundle,
        acceptance,
        phases,
        observability.log_format,
        require_warm=require_warm,
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
                stall_seconds=serving.stall_seconds,
                observability=observability,
                access=access,
                tls=tls,
                chat_template=serving.chat_template,
                parsers=parsers,
            ),
            process,
            phases,
        )
