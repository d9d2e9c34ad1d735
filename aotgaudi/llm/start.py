"""Starts a model from a bundle and a model directory, for `aotgaudi serve` and `aotgaudi.LLM`.

The guarantee depends on the order: nothing is mapped before the bundle is verified and the target checked. Without
`require_warm`, objects are not hashed for that.
"""

from __future__ import annotations

import logging
import warnings

from aotgaudi.backends.online import check_target, prepare_process
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.model import open_model
from aotgaudi.errors import CoverageError
from aotgaudi.llm.pinned import pinned
from aotgaudi.llm.running import ModelOptions, Observers, RunningModel
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.runtime.shards import ShardReader
from aotgaudi.spec.scheduler import SchedulerSpec

logger = logging.getLogger(__name__)


def start(options: ModelOptions, observers: Observers) -> RunningModel:
    """Returns a model whose engine runs. The guard is not armed yet; the caller decides about it.

    The parsed bundle and programs are freed when this returns.

    Raises:
        SpecError: the model does not exist or is not the bundle's, the bundle holds a capture, or `kv_cache_bytes` is unfit.
        NotWarmError, CorruptError, UntrustedError, TargetError: the bundle cannot be used; nothing was mapped.
        CoverageError: under `require_warm`, a possible step has no entry.
    """
    phases = observers.phases
    with phases.time("open"):
        bundle = open_bundle(options.bundle, options.acceptance)
        receipt = bundle.require_programs()
        model = open_model(bundle, options.model_dir, allow_unbound=options.allow_unbound_model)
        check_target(receipt.target)
        prepare_process(receipt.target)
    if observers.on_model is not None:
        observers.on_model(model)
    with pinned(
        bundle,
        ShardReader(model),
        phases,
        hashes=options.hashes,
        kv_cache_bytes=options.kv_cache_bytes,
    ) as parts:
        with phases.time("coverage"):
            check_coverage(parts.manifest, require_warm=options.require_warm)
        with warnings.catch_warnings(), phases.time("import_torch"):
            # torch warns if numpy is missing, which [serve] does not need.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
            # Imported only now, so that whatever can fail without torch fails within a fraction of a second.
            from aotgaudi.llm.assemble import assemble

        return assemble(options, observers, parts)


def check_coverage(manifest: Manifest, *, require_warm: bool) -> None:
    """Warns of possible steps without an entry; under `require_warm`, raises CoverageError instead."""
    coverage = coverage_of(manifest, SchedulerSpec())  # Our scheduler serves, whatever the spec describes.
    if coverage.is_closed:
        return
    if require_warm:
        raise CoverageError(
            f"manifest: {coverage} (`aotgaudi coverage MANIFEST` lists the holes and says what closes them)"
        )
    logger.warning("%s: prompts are cut shorter where that helps; else such requests fail", coverage)
