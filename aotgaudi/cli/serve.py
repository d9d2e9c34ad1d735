"""``aotgaudi serve``: a bundle and a model directory, over the OpenAI API."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from aotgaudi.cli.options.acceptance import acceptance_options
from aotgaudi.cli.options.capacity import capacity_options
from aotgaudi.cli.options.common import Command, FiniteRange, store_option
from aotgaudi.cli.options.exposure import exposure_options
from aotgaudi.cli.options.listening import listening_options
from aotgaudi.cli.options.supervision import SUPERVISION_NAMES, Supervision, supervision_options
from aotgaudi.cli.run import supervise
from aotgaudi.errors import MissingPackageError
from aotgaudi.machine import available_cores
from aotgaudi.spec.policy import Policy

if TYPE_CHECKING:
    from aotgaudi.bundle.part import Outside
    from aotgaudi.bundle.trust import TrustPolicy
    from aotgaudi.engine.room import RoomLimits
    from aotgaudi.runtime.guard import Seccomp
    from aotgaudi.runtime.shards import WeightsMemory
    from aotgaudi.server.exposure import Exposure
    from aotgaudi.server.front.limits import Listening


def _generation_options(function: Command) -> Command:
    """``--generation-config`` and its override; the command gets them as one argument `generation`: source, override."""

    @functools.wraps(function)
    def command(*, source: str, override: Mapping[str, Any], **others: Any) -> Any:
        return function(generation=(source, override), **others)

    source_option = click.option(
        "--generation-config",
        "source",
        default="auto",
        show_default=True,
        metavar="SOURCE",
        help="Sampling defaults: auto (the model's generation_config.json), vllm (none), or a directory.",
    )
    override_option = click.option(
        "--override-generation-config",
        "override",
        callback=_parse_override,
        metavar="JSON",
        help="Sampling defaults that win over the file's, e.g. '{\"temperature\": 0.6}'.",
    )
    return source_option(override_option(command))


def _parse_override(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> Mapping[str, Any]:
    if value is None:
        return {}
    from aotgaudi.llm.model_files import SAMPLING_DEFAULTS

    try:
        override = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"is not JSON: {error}", context, parameter) from error
    if not isinstance(override, dict):
        raise click.BadParameter("must be a JSON object", context, parameter)
    for name in override:
        if name not in SAMPLING_DEFAULTS:
            known = ", ".join(SAMPLING_DEFAULTS)
            raise click.BadParameter(f"has {name!r}; the sampling defaults are {known}", context, parameter)
    return override


@click.command()
@click.option(
    "--bundle", type=click.Path(path_type=Path), required=True, metavar="DIR", help="What `build` sealed."
)
@click.option("--model", metavar="DIR", help="Model directory (or hub id): config, weights, tokenizer.")
@click.option(
    "--require-warm", is_flag=True, help="Refuse to start unless every entry is warm; never compile."
)
@listening_options
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name in the API (repeatable)  [default: the directory's name]",
)
@_generation_options
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of matrix products  [default: $OMP_NUM_THREADS, or one per core of this process's quota]",
)
@click.option(
    "--allow-unbound-model",
    is_flag=True,
    help="With --trusted-key: take a bundle whose signature does not cover the model directory.",
)
@click.option(
    "--weights-memory",
    type=click.Choice(["copy", "map"]),
    default="copy",
    show_default=True,
    help="copy: read weights into memory of our own; map: map the files, which must then never change.",
)
@click.option(
    "--drain-delay",
    type=FiniteRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to answer 503 after SIGTERM, before the socket closes.",
)
@capacity_options
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "prefix_caching",
    default=None,
    help="Whether prompts start after what is cached of them  [default: as the bundle's spec says, which is yes]",
)
@click.option(
    "--policy",
    type=click.Choice(get_args(Policy)),
    help="How prompts and decodes take turns: even streams, or full steps  [default: as the bundle's spec says]",
)
@click.option(
    "--outside",
    type=click.Choice(["refuse", "chunk", "pad-up", "first-use"]),
    help="What the warm entries of a part do not cover: refuse it; cut prompts into shorter chunks; start only if larger "
    "entries cover all; compile it  [default: refuse with --require-warm, else first-use]",
)
@click.option(
    "--seccomp",
    type=click.Choice(["auto", "require", "off"]),
    default="auto",
    show_default=True,
    help="Have the kernel refuse to start processes, once ready (the engine with --require-warm only).",
)
@exposure_options
@acceptance_options
@supervision_options
@store_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORDS]")
@click.pass_context
def serve(  # noqa: PLR0913 - one argument per option
    context: click.Context,
    *,
    bundle: Path,
    model: str | None,
    require_warm: bool,
    listening: Listening,
    names: tuple[str, ...],
    generation: tuple[str, Mapping[str, Any]],
    threads: int | None,
    allow_unbound_model: bool,
    weights_memory: WeightsMemory,
    drain_delay: float,
    room: RoomLimits,
    stall_seconds: float | None,
    prefix_caching: bool | None,
    policy: Policy | None,
    outside: Outside | None,
    seccomp: Seccomp,
    exposure: Exposure,
    acceptance: TrustPolicy,
    supervision: Supervision,
    store_root: Path,
    words: tuple[str, ...],
) -> None:
    """Serve a model from a verified BUNDLE. With --require-warm it starts warm or not at all.

    A bundle that `build capture` sealed is run as `aotgaudi run` does it, by the sealed command; WORDS are added to that.
    """
    from aotgaudi.bundle.capture_receipt import is_capture
    from aotgaudi.phases import Phases, since_process_start

    phases = Phases(since_process_start())
    phases.add("process", 0.0)
    import_began = phases.clock()
    if is_capture(bundle):
        _refuse_given(context, of_captures=False)
        supervise(
            bundle,
            require_warm,
            supervision,
            acceptance,
            extra_words=words,
            log_format=exposure.log_format,
        )
    _refuse_given(context, of_captures=True)
    if words:
        raise click.UsageError("words after -- go with bundles that `build capture` sealed")
    if model is None:
        raise click.UsageError("Missing option '--model'.")
    if outside is not None and require_warm is (outside == "first-use"):
        goes = (
            "compiles while requests wait: it excludes" if require_warm else "serves what is warm: it needs"
        )
        raise click.UsageError(f"--outside {outside} {goes} --require-warm")
    if seccomp == "require" and not require_warm:
        raise click.UsageError("--seccomp require goes with --require-warm: else a builder may have to start")
    _require_packages()
    from aotgaudi.cli.options.model import find_model

    model_dir = find_model(model)
    context.call_on_close(gc.enable)
    gc.disable()  # What a start makes stays; `launch` has garbage looked for again.
    from aotgaudi.server.engine.start import EngineProcess

    _bound_spinning()
    with EngineProcess(phases.clock()) as process:
        from aotgaudi.llm.model_files import GenerationConfig
        from aotgaudi.llm.running import ModelOptions
        from aotgaudi.server.engine.channel import Begin
        from aotgaudi.server.log import log_handler

        model_options = ModelOptions(
            bundle=bundle,
            acceptance=acceptance,
            model_dir=model_dir,
            require_warm=require_warm,
            num_threads=threads or _threads(),
            allow_unbound_model=allow_unbound_model,
            weights_memory=weights_memory,
            store_root=store_root,
            generation_config=GenerationConfig(*generation),
            environment=dict(os.environ),
            prefix_caching=prefix_caching,
            policy=policy,
            outside=outside,
        )
        # Where the server does not require warm, its engine has to start builders.
        engine_seccomp = seccomp if require_warm else "off"
        process.begin(Begin(options=model_options, seccomp=engine_seccomp, log_format=exposure.log_format))
        logging.basicConfig(level=logging.INFO, handlers=[log_handler(sys.stderr, exposure.log_format)])
        logging.captureWarnings(exposure.log_format == "json")
        from aotgaudi.server.front.run import StopTimes
        from aotgaudi.server.launch import ServeOptions, launch

        phases.add("import", import_began)
        launch(
            ServeOptions(
                require_warm=require_warm,
                listening=listening,
                served_model_names=names or (served_name(model),),
                room=room,
                seccomp=seccomp,
                stop_times=StopTimes(delay=drain_delay),
                stall_seconds=stall_seconds,
                exposure=exposure,
            ),
            process,
            phases,
        )


_OF_BOTH = frozenset(
    {
        "bundle",
        "require_warm",
        "log_format",
        "trusted_keys",
        "threshold",
        "minimum_epoch",
        "allow_unsafe_permissions",
        "words",
    }
)


def _refuse_given(context: click.Context, *, of_captures: bool) -> None:
    """Raises UsageError for an option of one kind of bundle that was given although the bundle is of the other kind."""
    for parameter in context.command.params:
        name = parameter.name or ""
        is_of_captures = name in SUPERVISION_NAMES
        if name in _OF_BOTH or is_of_captures is not of_captures:
            continue
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            kind = "bundles that `build capture` sealed" if of_captures else "bundles of programs"
            remedy = "" if of_captures else "; options of the server that is run follow --"
            raise click.UsageError(f"{parameter.opts[0]} goes with {kind}{remedy}")


def served_name(model: str) -> str:
    """Returns the name in the API: a hub id as given, else the directory's name (for a link, the link's own)."""
    return Path(os.path.abspath(model)).name if Path(model).exists() else model


def _require_packages() -> None:
    """Raises MissingPackageError where an extra is missing, before another process finds that out."""
    for package in ("torch", "tokenizers", "uvicorn"):
        if find_spec(package) is None:
            raise MissingPackageError(package, "serve")


def _bound_spinning() -> None:
    """Bounds how long OpenMP's threads spin for work, unless the user has set it. Call it before libgomp is loaded.

    By default they spin for so long that a second busy process on the same cores costs hundreds of
    milliseconds a step; a thousand turns cost an idle machine 2 ms of a decode step (docs/benchmarks.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _threads() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else available_cores()
