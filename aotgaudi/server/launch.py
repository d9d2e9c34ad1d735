"""Starts the API server: verify, load, arm the guard, listen.

The guarantee of ``--require-warm`` depends on this order. Nothing is mapped before the bundle is verified and the target
checked. Nothing listens before everything is loaded. From then on, nothing in this process can compile.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from starlette.types import ASGIApp

from aotgaudi import __version__
from aotgaudi.engine.limits import UNLIMITED, AdmissionLimits
from aotgaudi.machine import Threads, is_loopback
from aotgaudi.phases import Phases, listed
from aotgaudi.runtime.guard import Guard, Seccomp
from aotgaudi.runtime.memory import freed_memory
from aotgaudi.runtime.seccomp import leave_others_alone
from aotgaudi.server.app import create_app
from aotgaudi.server.boundary import OPEN_PATHS, AllowedHosts
from aotgaudi.server.engine.client import EngineClient
from aotgaudi.server.engine.start import EngineProcess
from aotgaudi.server.metrics import Metrics
from aotgaudi.server.options import (
    DEFAULT_STOP_TIMES,
    OPEN_ACCESS,
    Access,
    Listening,
    Observability,
    ReplyParsers,
    StopTimes,
    allow_connections,
)
from aotgaudi.server.preprocess.pool import PreprocessorPool
from aotgaudi.server.preprocess.prepare import ServedModel
from aotgaudi.server.run_and_drain import HttpServer, bind, socket_file
from aotgaudi.server.service import Service

if TYPE_CHECKING:
    import ssl

_Wrap: TypeAlias = Callable[[ASGIApp], ASGIApp]

_EXPORT_SECONDS, _MAX_SPANS = 3, 2048
"""How long sending spans may take, and how many may wait. At the end at most two batches are sent."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the API server: its model, how it listens, admits clients, guards, is observed and stops.

    `chat_template` is a file; None stands for the model's template. `model_root` is where the model comes from, as reported
    to clients. With `tls`, it speaks HTTPS. Without `require_warm` there is no guard.
    """

    require_warm: bool
    threads: Threads
    served_model_names: tuple[str, ...]
    listening: Listening
    model_root: str = ""
    admission: AdmissionLimits = UNLIMITED
    seccomp: Seccomp = "auto"
    chat_template: Path | None = None
    parsers: ReplyParsers = ReplyParsers()  # noqa: RUF009 - a frozen value
    stop_times: StopTimes = DEFAULT_STOP_TIMES
    observability: Observability = Observability()  # noqa: RUF009 - a frozen value
    access: Access = OPEN_ACCESS
    tls: ssl.SSLContext | None = None


def launch(options: ServeOptions, process: EngineProcess, phases: Phases) -> None:
    """Serves until a signal says to stop, or the engine or the preprocessor pool dies.

    `process` is the engine's, which is already starting.

    Raises:
        SpecError: the model does not exist or is not the bundle's, or the address is unusable.
        NotWarmError, CorruptError, UntrustedError, TargetError: the bundle cannot be served; nothing was mapped.
        TargetError: the kernel must refuse processes, and cannot.
        CoverageError: under `require_warm`, a step that the scheduler can form has no entry.
        AotGaudiError: the engine's process or the preprocessor pool ended without being asked to.
    """
    listening, has_keys = options.listening, bool(options.access.key_digests)
    with ExitStack() as stack:
        with phases.time("bind"):
            bound = socket_file(listening.uds) if listening.uds else bind(listening.host, listening.port)
            listener = stack.enter_context(bound)
        preprocessor = stack.enter_context(PreprocessorPool(seccomp=options.seccomp))
        traced = stack.enter_context(tracing(options.observability.otlp_traces_endpoint))
        leave_others_alone()  # The engine's process and the pool run already, so they are among the others.
        service, engine = _start_service(options, process, preprocessor, phases)
        logger.info("%s", options.threads)
        armed = phases.clock()

        def on_listening(url: str) -> None:
            engine.attach()
            preprocessor.attach()
            phases.add("listen", armed)
            done, seconds = phases.done, phases.clock()
            service.metrics.tell_start(seconds, done)
            name = options.served_model_names[0]
            logger.info("ready in %.2f s: %s (model %s)", seconds, url, name)
            logger.info("start: %s (seconds since the process began)", listed(done))

        if listening.uds is None:
            warn_of_reach(listening.host, asks_for_key=has_keys)
        hosts = AllowedHosts(listening.host if listening.uds is None else "", listening.allowed_hosts)
        app = create_app(service, hosts, options.observability, options.access, listening.root_path)
        server = HttpServer(
            traced(app),
            listener,
            service,
            on_listening=on_listening,
            stop_times=options.stop_times,
            max_connections=allow_connections(),
            housekeeping=freed_memory().give_back,
            tls=options.tls,
        )
        service.metrics.connections.set_function(lambda: server.num_connections)
        gc.freeze()  # Loaded objects stay, so the collector can skip them.
        gc.enable()
        server.run_until_stopped()
        if service.failure is not None:
            raise service.failure


@contextmanager
def tracing(url: str | None) -> Iterator[_Wrap]:
    """Yields what makes an application send a span for each request to `url`. Sends the last spans.

    Enter it before the guard is armed, since it imports OpenTelemetry. Without a `url` it does nothing.
    """
    if url is None:
        yield lambda app: app
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "aotgaudi", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=_MAX_SPANS, max_export_batch_size=_MAX_SPANS)
    )
    try:
        yield partial(
            OpenTelemetryMiddleware,
            excluded_urls=",".join(f"{path}$" for path in OPEN_PATHS),
            tracer_provider=provider,
            exclude_spans=["receive", "send"],
        )
    finally:
        provider.shutdown()


def warn_of_reach(host: str, *, asks_for_key: bool = False) -> None:
    """Logs a warning if clients on other machines can use a server on `host` without a key."""
    if not asks_for_key and not is_loopback(host):
        logger.warning(
            "listening on %s: any client that reaches this address can use the server, which asks for no key. Give "
            "--api-key-file, put a proxy with authentication in front of it (ci/templates/nginx.conf), or listen on "
            "127.0.0.1",
            host,
        )


def _start_service(
    options: ServeOptions, process: EngineProcess, preprocessor: PreprocessorPool, phases: Phases
) -> tuple[Service, EngineClient]:
    """Waits until the engine runs and requests can be prepared, and arms the guard. Raises what `launch` does.

    The caller attaches engine and preprocessor to an event loop.
    """
    began, metrics = phases.clock(), Metrics(options.served_model_names[0], __version__)
    preprocessor.load(process.opened(), options.chat_template)
    running = process.running()
    phases.keep(running.phases)
    limits = running.rules.limits
    served = ServedModel(
        names=options.served_model_names,
        root=options.model_root,
        max_len=limits.max_model_len,
        defaults=running.defaults,
        parsers=options.parsers,
    )
    preprocessor.open(served)
    phases.add("intake", began)
    guard = Guard()
    if options.require_warm:
        guard.arm(seccomp=options.seccomp)
    engine = EngineClient(process, running, options.admission, metrics.observe_step)
    service = Service(
        engine=engine,
        preprocessor=preprocessor,
        model=served,
        manifest_id=running.manifest_id,
        binding=running.binding,
        limits=limits,
        warmth=lambda: engine.warmth().plus(guard),
        version=__version__,
        metrics=metrics,
    )
    return service, engine
