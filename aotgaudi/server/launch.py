"""From a bundle and a model directory to a server that listens: verify, load, arm the guard, listen.

The order is the guarantee: nothing is mapped before the bundle is verified and the target checked, nothing
listens before everything is loaded, and from then on nothing in this process can compile.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
from dataclasses import dataclass, replace

from aotgaudi import __version__
from aotgaudi.llm.running import ModelOptions
from aotgaudi.llm.start import start
from aotgaudi.phases import listed
from aotgaudi.runtime.allocator import freed_memory
from aotgaudi.runtime.guard import Seccomp
from aotgaudi.server.app import create_app
from aotgaudi.server.exposure import Exposure
from aotgaudi.server.front.hosts import AllowedHosts
from aotgaudi.server.front.limits import Listening
from aotgaudi.server.front.run import HttpServer, StopTimes, bind
from aotgaudi.server.intake.intake import Intake
from aotgaudi.server.intake.prepare import ServedModel
from aotgaudi.server.metrics import Metrics
from aotgaudi.server.service import DEFAULT_STALL_SECONDS, Service

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 5e-4
"""How long the engine's thread may keep the event loop from going on each time that it has called the kernel: Python's own
5 ms, some ten times a request, would be most of what a request takes."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What ``aotgaudi serve`` was told: the model, where to listen, under which names, how to guard and how to stop.

    `seccomp` is about the server only where `model` requires warm, since else it starts builders; and about the intake.
    `stall_seconds` is what ``/health`` takes for stuck. None: 60 under `require_warm`, else never, since a step
    that builds an entry on first use takes as long as it takes.
    """

    model: ModelOptions
    listening: Listening
    served_model_names: tuple[str, ...]
    seccomp: Seccomp = "auto"
    stop_times: StopTimes = StopTimes()  # noqa: RUF009 - a frozen value
    stall_seconds: float | None = None
    exposure: Exposure = Exposure()  # noqa: RUF009 - a frozen value

    @property
    def longest_step_seconds(self) -> float:
        """How long a step may take."""
        default = DEFAULT_STALL_SECONDS if self.model.require_warm else math.inf
        return default if self.stall_seconds is None else self.stall_seconds


def launch(options: ServeOptions) -> None:
    """Serves until a signal says to stop.

    Raises:
        SpecError: no such model, another model than the bundle's, an address that cannot be had.
        NotWarmError, CorruptError, UntrustedError, TargetError: the bundle cannot be served; nothing was mapped.
        TargetError: the kernel is required to refuse processes, and cannot.
        CoverageError: under `require_warm`, a step that the scheduler can form has no entry.
        AotGaudiError: the intake ended before the server was ready.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    phases = options.model.phases
    with phases.time("bind"):
        listener = bind(options.listening.host, options.listening.port)
    intake_began = phases.clock()
    with listener, Intake(seccomp=options.seccomp) as intake:
        service = _start(options, intake, intake_began)
        armed = phases.clock()

        def on_listening(host: str, port: int) -> None:
            intake.attach()
            phases.add("listen", armed)
            done, seconds = phases.done, phases.clock()
            service.metrics.tell_start(seconds, done)
            name = options.served_model_names[0]
            logger.info("ready in %.2f s: http://%s:%d (model %s)", seconds, host, port, name)
            logger.info("start: %s (seconds since the process began)", listed(done))

        hosts = AllowedHosts.of(options.listening.host, options.listening.allowed_hosts)
        server = HttpServer(
            create_app(service, hosts, options.exposure),
            listener,
            service,
            on_listening=on_listening,
            stop_times=options.stop_times,
            limits=options.listening.limits(),
            on_close=service.metrics.count_closed,
            housekeeping=freed_memory().give_back,
        )
        service.metrics.connections.set_function(lambda: server.num_connections)
        gc.freeze()  # What is loaded stays, and need not be looked through again and again for garbage.
        gc.enable()
        server.run_until_stopped()
    if (
        not service.has_ended()
    ):  # Its thread is in the middle of a step that does not end; unwinding would crash.
        logging.shutdown()
        os._exit(0)


def _start(options: ServeOptions, intake: Intake, intake_began: float) -> Service:
    metrics, phases = Metrics(options.served_model_names[0]), options.model.phases
    model = start(replace(options.model, on_step=metrics.observe_step, on_model=intake.load))
    served = ServedModel(
        names=options.served_model_names,
        max_len=model.max_model_len,
        defaults=model.defaults,
        outside=model.outside,
    )
    service = Service(
        engine=model.engine,
        intake=intake,
        tokenizer=model.tokenizer,
        model=served,
        manifest_id=model.manifest_id,
        binding=model.binding,
        coverage=model.coverage,
        limits=model.limits,
        warmth=model.warmth,
        version=__version__,
        metrics=metrics,
        stall_seconds=options.longest_step_seconds,
    )
    intake.open(served)
    phases.add("intake", intake_began)
    seccomp = options.seccomp if options.model.require_warm else "off"
    with phases.time("guard"):
        model.guard.arm(seccomp=seccomp, hand_over=intake.answer_for_kernel)
    return service
