"""Puts a server together from a bundle that is being verified: programs, engine, service, guard.

Importing this module imports torch, which takes as long as hashing the bundle; `launch` does both at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from aotgaudi import __version__
from aotgaudi.backends.online import make_runtime
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.verify import Report, VerifiedBundle
from aotgaudi.engine.admission import Admission
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.loop import Engine
from aotgaudi.engine.runner import OnCold, ProgramRunner, refuse_cold
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.entries import Entry
from aotgaudi.errors import CoverageError, SpecError
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.runtime.allocator import keep_freed_memory
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.first_use import FirstUseBuilder
from aotgaudi.runtime.guard import Guard
from aotgaudi.runtime.load import Artifacts, Loader, check_model, declare_samplers
from aotgaudi.server.chat import ChatTemplate
from aotgaudi.server.metrics import Metrics, WarmCounts
from aotgaudi.server.model_files import read_json_object
from aotgaudi.server.options import ServeOptions
from aotgaudi.server.service import Service
from aotgaudi.server.tokenizer import Tokenizer
from aotgaudi.spec.model import ModelSpec

logger = logging.getLogger(__name__)


def assemble(
    options: ServeOptions, bundle: Bundle, manifest: Manifest, pending: Future[VerifiedBundle]
) -> Service:
    """Returns a service whose engine runs and whose process can no longer compile. See `launch` for errors."""
    keep_freed_memory()
    torch.set_num_threads(1)  # This thread loads; the engine's computes (see ProgramRunner).
    check_model(manifest.spec, _model_of(options.model_dir, manifest), options.model_dir)
    tokenizer = Tokenizer.load(options.model_dir)
    table = BucketTable.from_entries(manifest.entries)
    check_coverage(manifest, require_warm=options.require_warm)
    verified = pending.result()
    sound = _accept(verified.report, manifest.entries, options)

    executables, metrics, guard = ExecutableTable(), Metrics(), Guard()
    declare_samplers(manifest.entries, executables)
    loader = Loader(make_runtime(bundle.receipt.target), options.model_dir)
    artifacts = Artifacts(bundle.receipt, verified.program, verified.read, verified.path)
    loader.load(sound, artifacts, executables)

    on_cold = _on_cold(options, bundle, loader, executables, metrics, guard)
    runner = ProgramRunner(executables, manifest.spec.limits.block_size, on_cold, options.num_threads)
    engine = _engine(manifest, table, runner, tokenizer, metrics)
    service = Service(
        engine=engine,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(options.model_dir),
        model_names=options.served_model_names,
        max_model_len=manifest.spec.limits.max_model_len,
        manifest_id=manifest.id,
        warm_counts=lambda: WarmCounts(len(executables), len(manifest.entries)),
        version=__version__,
        metrics=metrics,
    )
    metrics.watch_refusals(lambda: guard.num_refused)
    engine.start()
    guard.arm()
    logger.info(
        "%d of %d entries warm, manifest %s", len(executables), len(manifest.entries), manifest.id[:16]
    )
    return service


def _engine(
    manifest: Manifest, table: BucketTable, runner: ProgramRunner, tokenizer: Tokenizer, metrics: Metrics
) -> Engine:
    spec = manifest.spec
    pool = BlockPool(spec.limits.num_blocks)
    scheduler = Scheduler(spec.limits, table, pool, eos_token_ids=tokenizer.eos_token_ids)
    return Engine(
        EngineCore(scheduler, runner, defrag=spec.defrag, on_step=metrics.observe_step),
        Admission(spec.limits, spec.model.vocab_size, spec.sampler),
        lambda ids: IncrementalDetokenizer(tokenizer.decode, ids),
    )


def _on_cold(
    options: ServeOptions,
    bundle: Bundle,
    loader: Loader,
    executables: ExecutableTable,
    metrics: Metrics,
    guard: Guard,
) -> OnCold:
    """What to do where an entry is not warm: refuse, or have the builder make it."""
    if options.require_warm:
        return refuse_cold

    def on_built(_: Entry, num_compiled: int) -> None:
        metrics.count_not_warmed()
        for _i in range(num_compiled):
            metrics.count_compilation()

    return FirstUseBuilder(
        bundle.manifest_bytes,
        options.store_root,
        loader,
        executables,
        on_built=on_built,
        excused=guard.excusing,
        environment=options.environment,
    )


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


def check_coverage(manifest: Manifest, *, require_warm: bool) -> None:
    """Warns of steps that can be formed and have no entry. Raises CoverageError instead under `require_warm`."""
    coverage = coverage_of(manifest)
    if coverage.is_closed:
        return
    if require_warm:
        raise CoverageError(
            f"manifest: {coverage} (`aotgaudi coverage MANIFEST` lists the holes and says what closes them)"
        )
    logger.warning("%s: prompts are cut shorter where that helps; else such requests fail", coverage)
