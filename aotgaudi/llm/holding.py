"""What other threads read and hash while torch is imported: the bundle's objects, then the weights that they need."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.sealed import programs_of
from aotgaudi.bundle.verify import VerifiedBundle, hold_bundle
from aotgaudi.runtime.bindings import passing_weights, placed, weight_bindings
from aotgaudi.runtime.shards import ShardReader


@dataclass(frozen=True)
class Holding:
    """A bundle, the weights of its model, and when each is in memory. `prefetched` fails where `verified` does."""

    bundle: Bundle
    weights: ShardReader
    verified: Future[VerifiedBundle]
    prefetched: Future[None]


@contextmanager
def holding(bundle: Bundle, weights: ShardReader) -> Iterator[Holding]:
    """Reads and hashes while the block runs; an error in the block ends that soon."""
    labels = bundle.entry_labels

    def prefetch() -> None:
        receipt = programs_of(bundle)
        programs = [placed(program, receipt) for program in verified.result().programs.values()]
        specs = [spec for program in programs for spec in program.weights]
        weights.prefetch(specs, passing_weights(weight_bindings(programs)))

    with ThreadPoolExecutor(2) as pool:
        verified = pool.submit(hold_bundle, bundle, labels)
        prefetched = pool.submit(prefetch)
        try:
            yield Holding(bundle, weights, verified, prefetched)
        except BaseException:
            weights.stop()
            raise
