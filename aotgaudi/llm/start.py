"""Starts a model from a bundle and a model directory, for `aotgaudi serve` and `aotgaudi.LLM`.

The guarantee depends on the order: nothing is mapped before the bundle is verified and the target checked. Without
`require_warm`, objects are not hashed for that.
"""

from __future__ import annotations

import logging
import warnings

from aotgaudi.backends.online import check_target, prepare_process
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.model_directory import open_model
from aotgaudi.errors import CoverageError
from aotgaudi.llm.pinned import pinned
from aotgaudi.llm.running import ModelOptions, Observers, RunningModel
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import kv_cache_bytes, memory_option
from aotgaudi.runtime.shards import ShardReader
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.scheduler import SchedulerSpec

logger = logging.getLogger(__name__)


def start(options: ModelOptions, observers: Observers) -> RunningModel:
    """Returns a model whose engine runs. The guard is not armed yet; the caller decides about it.

    The parsed bundle and programs are freed when this returns.

    Raises:
        SpecError: the model does not exist or is not the bundle's, the bundle holds a capture, or `kv_cache_bytes` is unfit.
        NotWarmError, CorruptError, UntrustedError, TargetError: the bundle cannot be used; nothing was mapped.
        CoverageError: under `require_warm`, or with more KV blocks than the bundle's, a possible step has no entry.
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
            check_coverage(parts.manifest, require_warm=options.require_warm, sealed=bundle.manifest.spec)
        with warnings.catch_warnings(), phases.time("import_torch"):
            # torch warns if numpy is missing, which [serve] does not need.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
            # Imported only now, so that whatever can fail without torch fails within a fraction of a second.
            from aotgaudi.llm.assemble import assemble

        return assemble(options, observers, parts)


def check_coverage(manifest: Manifest, *, require_warm: bool, sealed: BuildSpec) -> None:
    """Warns of possible steps without an entry. Raises CoverageError instead under `require_warm`, or for more blocks.

    `sealed` is the spec as it was built. With more KV blocks than it has, a decode may read more than any entry does.
    """
    coverage = coverage_of(manifest, SchedulerSpec())  # Our scheduler serves, whatever the spec describes.
    if coverage.is_closed:
        return
    num_blocks, num_built = manifest.spec.limits.num_blocks, sealed.limits.num_blocks
    if num_blocks > num_built:
        raise CoverageError(
            f"manifest: with {num_blocks:,} KV blocks {coverage} (it was made for limits.num_blocks {num_built:,}: at most"
            f" --kv-cache-memory {memory_option(kv_cache_bytes(sealed))})"
        )
    if require_warm:
        raise CoverageError(
            f"manifest: {coverage} (`aotgaudi coverage MANIFEST` lists the holes and says what closes them)"
        )
    logger.warning("%s: prompts are cut shorter where that helps; else such requests fail", coverage)
