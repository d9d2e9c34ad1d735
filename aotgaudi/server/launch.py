"""From a bundle and a model directory to a server that listens: verify, load, arm the guard, listen.

The order is the guarantee: nothing is mapped before the bundle is verified and the target checked, nothing
listens before everything is loaded, and from then on nothing in this process can compile.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aotgaudi import __version__
from aotgaudi.backends.online import check_target
from aotgaudi.bucketing.coverage import uncovered
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bundle.verify import Bundle, Report, open_bundle, verify_bundle
from aotgaudi.errors import CorruptError, CoverageError, SpecError
from aotgaudi.manifest.codec import loads as load_manifest
from aotgaudi.manifest.entries import Entry
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.server.model_files import read_json_object
from aotgaudi.server.run import bind, serve_forever
from aotgaudi.spec.model import ModelSpec

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class ServeOptions:
    """What ``aotgaudi serve`` was told. `environment` is what a builder started on first use inherits."""

    bundle: Path
    model_dir: Path
    require_warm: bool
    host: str
    port: int
    served_model_names: tuple[str, ...]
    num_threads: int
    store_root: Path
    environment: Mapping[str, str]


def launch(options: ServeOptions) -> None:
    """Serves until a signal says to stop.

    Raises:
        SpecError: no such model, another model than the bundle's, an address that cannot be had.
        NotWarmError, CorruptError, TargetError: the bundle cannot be served; nothing was mapped.
        CoverageError: under `require_warm`, a step that the scheduler can form has no entry.
    """
    listener = bind(options.host, options.port)
    try:
        bundle = open_bundle(options.bundle)
        manifest = _manifest(bundle)
        check_target(bundle.receipt.target)
        with ThreadPoolExecutor(1) as pool:
            report = pool.submit(verify_bundle, bundle, {entry.id: str(entry) for entry in manifest.entries})
            app, on_stop, on_ready = _assemble(options, bundle, manifest, report)
    except BaseException:
        listener.close()
        raise

    def on_listening(host: str, port: int) -> None:
        seconds = on_ready()
        logger.info(
            "ready in %.2f s: http://%s:%d (model %s)", seconds, host, port, options.served_model_names[0]
        )

    serve_forever(
        app,
        options.host,
        options.port,
        on_listening,
        listener=listener,
        on_stop=on_stop,
        drain_timeout_seconds=DRAIN_TIMEOUT_SECONDS,
    )


def _assemble(options: ServeOptions, bundle: Bundle, manifest: Manifest, pending: Future[Report]):  # type: ignore[no-untyped-def]
    """Imports what is heavy while the bundle is being hashed, then loads. See `launch`."""
    import torch  # Lazy: a bundle for another target is refused before a second is spent here.

    from aotgaudi.backends.online import make_runtime
    from aotgaudi.engine.detokenizer import IncrementalDetokenizer
    from aotgaudi.engine.loop import Engine
    from aotgaudi.engine.runner import ProgramRunner, refuse_cold
    from aotgaudi.runtime.allocator import keep_freed_memory
    from aotgaudi.runtime.executables import ExecutableTable
    from aotgaudi.runtime.first_use import FirstUseBuilder
    from aotgaudi.runtime.guard import Guard
    from aotgaudi.runtime.load import Artifacts, Loader, check_model, declare_samplers
    from aotgaudi.server.app import create_app
    from aotgaudi.server.chat import ChatTemplate
    from aotgaudi.server.metrics import Metrics, WarmCounts
    from aotgaudi.server.service import Service
    from aotgaudi.server.tokenizer import Tokenizer

    spec, limits = manifest.spec, manifest.spec.limits
    keep_freed_memory()
    torch.set_num_threads(options.num_threads)
    check_model(spec, _model_of(options.model_dir, manifest), options.model_dir)
    tokenizer = Tokenizer.load(options.model_dir)
    sound = _accept(pending.result(), manifest.entries, options)
    table = BucketTable.from_entries(manifest.entries)
    _check_coverage(manifest, table, options)

    executables = ExecutableTable()
    declare_samplers(manifest.entries, executables)
    loader = Loader(make_runtime(bundle.receipt.target), options.model_dir)
    artifacts = Artifacts(bundle.receipt, bundle.program, bundle.read_object, bundle.object_path)
    loader.load(sound, artifacts, executables)

    metrics, guard = Metrics(), Guard()

    def on_built(_: object, num_compiled: int) -> None:
        metrics.count_not_warmed()
        for _i in range(num_compiled):
            metrics.count_compilation()

    builder = FirstUseBuilder(
        bundle.path / "manifest.json",
        options.store_root,
        loader,
        executables,
        on_built=on_built,
        excused=guard.excusing,
        environment=options.environment,
    )
    runner = ProgramRunner(executables, limits.block_size, refuse_cold if options.require_warm else builder)
    engine = Engine(
        limits,
        table,
        runner,
        new_detokenizer=lambda ids: IncrementalDetokenizer(tokenizer.decode, ids),
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=spec.model.vocab_size,
        defrag=spec.defrag if spec.defrag.enabled else None,
        on_step=metrics.observe_step,
    )
    service = Service(
        engine=engine,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(options.model_dir),
        model_names=options.served_model_names,
        max_model_len=limits.max_model_len,
        manifest_id=manifest.id,
        warm_counts=lambda: WarmCounts(len(executables), len(manifest.entries)),
        version=__version__,
        metrics=metrics,
    )
    app = create_app(service, drain_timeout_seconds=DRAIN_TIMEOUT_SECONDS)
    metrics.watch_refusals(lambda: guard.num_refused)
    engine.start()
    guard.arm()
    logger.info(
        "%d of %d entries warm, manifest %s", len(executables), len(manifest.entries), manifest.id[:16]
    )

    def on_ready() -> float:
        seconds = seconds_since_start()
        metrics.set_time_to_ready(seconds)
        return seconds

    return app, service.begin_drain, on_ready


def _manifest(bundle: Bundle) -> Manifest:
    manifest = load_manifest(bundle.manifest_bytes)
    if manifest.id != bundle.receipt.manifest_id:
        raise CorruptError(
            f"bundle {bundle.path}: manifest.json has id {manifest.id}, the receipt answers {bundle.receipt.manifest_id}"
        )
    return manifest


def _model_of(model_dir: Path, manifest: Manifest) -> ModelSpec:
    """Returns what the directory's config.json says, in the dtype that the bundle was built for."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise SpecError(str(model_dir), "has no config.json", "a Hugging Face model directory")
    return ModelSpec(name=model_dir.name, dtype=manifest.spec.model.dtype, config=read_json_object(path))


def _accept(report: Report, entries: Sequence[Entry], options: ServeOptions) -> list[Entry]:
    """Returns the entries that the bundle can run.

    Raises unless the bundle may be served: whole under `require_warm`, else merely not corrupt.
    """
    if options.require_warm or report.corrupt or report.extra:
        report.raise_if_bad(options.bundle)
    for gone in report.missing:
        logger.warning("entry %s is not in the bundle: it compiles on first use", gone.entry)
    missing = {gone.entry for gone in report.missing}
    return [entry for entry in entries if str(entry) not in missing]


def _check_coverage(manifest: Manifest, table: BucketTable, options: ServeOptions) -> None:
    for hole in uncovered(manifest.spec.limits, table):
        if options.require_warm:
            raise CoverageError(
                f"manifest: no entry covers {hole}; change the spec's limits or bucketing and build again"
            )
        logger.warning("no entry covers %s: such requests fail", hole)


def seconds_since_start() -> float:
    """Returns the seconds since this process was started by the kernel (resolution 10 ms)."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    started_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_after_boot)
