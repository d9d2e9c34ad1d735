"""Starts a model from a bundle and a model directory, for `aotgaudi serve` and `aotgaudi.LLM`.

The guarantee depends on the order: nothing is mapped before the bundle is verified and the target checked. Without
`require_warm`, objects are not hashed for that. While torch is imported, other threads pin and verify the bundle, read
weights and reserve KV caches.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from aotgaudi.backends.base import FIXED_NUM_BLOCKS, keeps_caches_on_host
from aotgaudi.backends.online import check_target, prepare_process
from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.model_directory import open_model
from aotgaudi.bundle.verify import VerifiedBundle, hold_bundle, require_memory
from aotgaudi.errors import CoverageError, SpecError, TargetError, first_line
from aotgaudi.llm.running import ModelOptions, Observers, RunningModel, VerifiedInputs
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import kv_cache_bytes, memory_option, with_kv_cache_memory
from aotgaudi.phases import Phases
from aotgaudi.runtime.memory import cache_memory
from aotgaudi.runtime.weights import ShardReader, placed
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
    with verified_inputs(
        bundle,
        ShardReader(model),
        phases,
        hashes=options.hashes,
        kv_cache_bytes=options.kv_cache_bytes,
    ) as inputs:
        with phases.time("coverage"):
            check_coverage(inputs.manifest, require_warm=options.require_warm, sealed=bundle.manifest.spec)
        with warnings.catch_warnings(), phases.time("import_torch"):
            # torch warns if numpy is missing, which [serve] does not need.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
            # Imported only now, so that whatever can fail without torch fails within a fraction of a second.
            from aotgaudi.llm.assemble import assemble

        return assemble(options, observers, inputs)


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


@contextmanager
def verified_inputs(
    bundle: Bundle,
    weights: ShardReader,
    phases: Phases,
    *,
    hashes: bool = True,
    kv_cache_bytes: int | None = None,
) -> Iterator[VerifiedInputs]:
    """Reads on other threads while the block runs, and times it in `phases`. An error in the block stops it.

    `hashes`: see `hold_bundle`. `kv_cache_bytes`: what the KV cache takes; None: what the limits say. Raises SpecError if it
    holds no sequence, or if the backend's units fix the number of blocks.
    """
    backend = bundle.require_programs().target.backend
    with phases.time("manifest"):
        manifest = bundle.manifest  # Parsed here once, before the threads need it.
        if kv_cache_bytes is not None:
            if backend in FIXED_NUM_BLOCKS:
                problem = f"is given, and graphs for {backend} are compiled for limits.num_blocks"
                raise SpecError(
                    "--kv-cache-memory", problem, "build the bundle with another limits.num_blocks"
                )
            manifest = replace(manifest, spec=with_kv_cache_memory(manifest.spec, kv_cache_bytes))

    def verify() -> VerifiedBundle:
        with phases.time("verify"):
            held = hold_bundle(bundle, hashes=hashes)
            try:
                held.report.raise_if_bad(bundle.path)
                require_memory(manifest, held.report)
            except BaseException:
                held.objects.close()
                raise
            return held

    def prefetch() -> None:
        found, receipt = verified.result().programs.values(), bundle.require_programs()
        with phases.time("weights"):
            programs = [placed(program, receipt) for program in found]
            specs = [spec for program in programs for spec in program.weights]
            weights.prefetch(specs)

    def reserve() -> Mapping[str, memoryview]:
        if not keeps_caches_on_host(backend):
            return {}
        specs = {
            spec.name: spec for program in verified.result().programs.values() for spec in program.caches
        }
        with phases.time("kv_caches"):
            limits = manifest.spec.limits
            try:
                return cache_memory(specs.values(), limits.num_blocks)
            except (OSError, MemoryError, OverflowError) as error:
                problem = f"cannot get memory for {limits.num_blocks:,} KV blocks: {first_line(error)}"
                raise TargetError(f"target: this process {problem}") from error

    with ThreadPoolExecutor(3) as pool:
        verified = pool.submit(verify)
        prefetched, caches = pool.submit(prefetch), pool.submit(reserve)
        try:
            yield VerifiedInputs(bundle, manifest, weights, verified, prefetched, caches)
        except BaseException:
            weights.stop()
            raise
