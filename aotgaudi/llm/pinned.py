"""Loads on other threads while torch is imported: pins and verifies the bundle, reads weights, reserves KV caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from aotgaudi.backends.base import FIXED_NUM_BLOCKS, keeps_caches_on_host
from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.verify import VerifiedBundle, hold_bundle, require_memory
from aotgaudi.errors import SpecError, TargetError, first_line
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import with_kv_cache_memory
from aotgaudi.phases import Phases
from aotgaudi.runtime.bindings import placed
from aotgaudi.runtime.memory import cache_memory
from aotgaudi.runtime.shards import ShardReader


@dataclass(frozen=True)
class Pinned:
    """A bundle, the weights of its model, and futures of their loading. If `verified` fails, the other futures fail too.

    `manifest` is the bundle's, with the number of KV blocks that is served. `caches` has memory for the KV caches, by name.
    """

    bundle: Bundle
    manifest: Manifest
    weights: ShardReader
    verified: Future[VerifiedBundle]
    prefetched: Future[None]
    caches: Future[Mapping[str, memoryview]]


@contextmanager
def pinned(
    bundle: Bundle,
    weights: ShardReader,
    phases: Phases,
    *,
    hashes: bool = True,
    kv_cache_bytes: int | None = None,
) -> Iterator[Pinned]:
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
            yield Pinned(bundle, manifest, weights, verified, prefetched, caches)
        except BaseException:
            weights.stop()
            raise
