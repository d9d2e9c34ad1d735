"""From a bundle and a model directory to a server that listens: verify, load, arm the guard, listen.

The order is the guarantee: nothing is mapped before the bundle is verified and the target checked, nothing
listens before everything is loaded, and from then on nothing in this process can compile.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from aotgaudi.backends.online import check_target
from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.verify import VerifiedBundle, hold_bundle
from aotgaudi.errors import CorruptError
from aotgaudi.manifest.codec import loads as load_manifest
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.server.app import create_app
from aotgaudi.server.options import ServeOptions
from aotgaudi.server.run import bind, serve_forever
from aotgaudi.server.service import Service

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_SECONDS = 30.0


def launch(options: ServeOptions) -> None:
    """Serves until a signal says to stop.

    Raises:
        SpecError: no such model, another model than the bundle's, an address that cannot be had.
        NotWarmError, CorruptError, UntrustedError, TargetError: the bundle cannot be served; nothing was mapped.
        CoverageError: under `require_warm`, a step that the scheduler can form has no entry.
    """
    listener = bind(options.host, options.port)
    try:
        service = _start(options)
    except BaseException:
        listener.close()
        raise

    def on_listening(host: str, port: int) -> None:
        seconds = seconds_since_start()
        service.metrics.set_time_to_ready(seconds)
        logger.info(
            "ready in %.2f s: http://%s:%d (model %s)", seconds, host, port, options.served_model_names[0]
        )

    serve_forever(
        create_app(service, drain_timeout_seconds=DRAIN_TIMEOUT_SECONDS),
        options.host,
        options.port,
        on_listening,
        listener=listener,
        on_stop=service.begin_drain,
        drain_timeout_seconds=DRAIN_TIMEOUT_SECONDS,
    )


def _start(options: ServeOptions) -> Service:
    """What is parsed on the way (bundle, programs) is let go when this returns."""
    bundle = open_bundle(options.bundle, options.acceptance)
    manifest = _manifest(bundle)
    check_target(bundle.receipt.target)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(hold_bundle, bundle, {entry.id: str(entry) for entry in manifest.entries})
        return _assemble(options, bundle, manifest, pending)


def _assemble(
    options: ServeOptions, bundle: Bundle, manifest: Manifest, pending: Future[VerifiedBundle]
) -> Service:
    """Imports torch and the rest only now: what can be refused without them has been, in a fraction of a second."""
    from aotgaudi.server.assemble import assemble

    return assemble(options, bundle, manifest, pending)


def _manifest(bundle: Bundle) -> Manifest:
    manifest = load_manifest(bundle.manifest_bytes)
    if manifest.id != bundle.receipt.manifest_id:
        raise CorruptError(
            f"bundle {bundle.path}: manifest.json has id {manifest.id}, the receipt answers {bundle.receipt.manifest_id}"
        )
    return manifest


def seconds_since_start() -> float:
    """Returns the seconds since this process was started by the kernel (resolution 10 ms)."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    started_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_after_boot)
