"""The options for the served model, and the start of its engine process."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from aotgaudi.cli.options import ABOVE_ZERO, POSITIVE, FiniteRange, option, parse_byte_count
from aotgaudi.cli.serving_options import find_model
from aotgaudi.errors import MissingPackageError
from aotgaudi.machine import Threads, bound_spinning, choose_threads
from aotgaudi.spec.policy import Policy

Seccomp = Literal["auto", "require", "off"]
"""As in `aotgaudi.runtime.guard`, which imports too much for a help text."""

if TYPE_CHECKING:
    from aotgaudi.bundle.trust import TrustPolicy
    from aotgaudi.phases import Phases
    from aotgaudi.server.engine.start import EngineProcess
    from aotgaudi.server.options import LogFormat

_SERVE = {"torch": "serve", "tokenizers": "serve", "uvicorn": "serve"}
OTEL = {
    "opentelemetry.sdk": "otel",
    "opentelemetry.exporter.otlp.proto.http": "otel",
    "opentelemetry.instrumentation.asgi": "otel",
}
"""The modules that `require_packages` looks for, with the extra that brings them."""


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
class Serving:
    """What to serve from a bundle of programs, and how."""

    model: str | None = option(
        "Model directory (or hub id): config, weights, tokenizer.", default=None, metavar="DIR"
    )
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
        default=None,
        parse=_parse_override,
        metavar="JSON",
    )
    chat_template: Path | None = option(
        "Chat template (Jinja) to use in place of the model's.", default=None, metavar="FILE"
    )
    threads: int | None = option(
        "Threads of matrix products  [default: $OMP_NUM_THREADS, or one per core of this process's quota that no other"
        " process keeps busy]",
        default=None,
        type=POSITIVE,
        metavar="N",
    )
    allow_unbound_model: bool = option(
        "With --trusted-key: take a bundle whose signature does not cover the model directory.", default=False
    )
    prefix_caching: bool | None = option(
        "Whether prompts start after what is cached of them  [default: as the bundle's spec says, which is yes]",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=None,
    )
    kv_cache_memory: int | None = option(
        "Memory of the KV cache, e.g. 4GiB  [default: of limits.num_blocks of the bundle's spec]",
        default=None,
        parse=parse_byte_count,
        metavar="SIZE",
    )
    policy: Policy | None = option(
        "How prompts and decodes take turns: even streams, or full steps  [default: as the bundle's spec says]",
        default=None,
    )
    seccomp: Seccomp = option(
        "With --require-warm: have the kernel refuse to start processes, once ready.",
        default="auto",
    )
    drain_delay: float = option(
        "How long to answer 503 after SIGTERM, before the socket closes.",
        default=5.0,
        type=FiniteRange(min=0),
        metavar="SECONDS",
    )
    stall_seconds: float = option(
        "Report unhealthy when requests wait and no step has finished for this long.",
        default=60.0,
        type=ABOVE_ZERO,
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


def require_packages(extras: Mapping[str, str] = _SERVE) -> None:
    """Raises MissingPackageError if a package of an extra is missing, before another process finds out."""
    for package, extra in extras.items():
        try:
            is_there = find_spec(package) is not None
        except ModuleNotFoundError:  # The package around it is missing as well.
            is_there = False
        if not is_there:
            raise MissingPackageError(package, extra)


@contextmanager
def begun_engine(
    choice: Serving,
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

        threads = choose_threads(os.environ, choice.threads, [process.pid])
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
