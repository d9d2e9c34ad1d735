"""Random requests within the limits of parts, through the real scheduler, no device: every step must have a warm entry.

For each manifest, subset after subset: the tiers, and prefixes of random orders of its entries; with whole and with cut
chunks, both policies, with and without prefix caching. Requests arrive while others run; their lengths are drawn so that
short and longest ones are frequent, and half of the prompts share a beginning. A step without an entry, an entry that is
not of the part, or a request that does not end is a failure. Needs neither torch nor a built store::

    python benchmarks/reliability/parts.py manifests/llama-3.1-8b.gaudi3.manifest.json --requests 1000000
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import resolve_max_tokens
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.entries import Entry, PromptEntry, SamplerEntry
from aotgaudi.manifest.importance import Importance, TierName
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec
from aotgaudi.manifest.subset import Chunks, Subset, largest_subset
from aotgaudi.spec.limits import ServingLimits

MOST_OUTPUT = 24
"""Tokens that a request generates at most, but for those that fill the longest sequence to its end."""


def main() -> None:
    """Prints a line a part; exits with 1 at the first failure, with the seed that repeats it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifests", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--orders", type=int, default=4, help="random orders for each manifest")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, started = random.Random(given.seed), time.monotonic()
    found = [one for path in given.manifests for one in parts(load_manifest_or_spec(path), rng, given.orders)]
    each, totals = -(-given.requests // len(found)), [0, 0]
    for name, part in found:
        num_steps = drive(part, each, rng)
        totals = [totals[0] + each, totals[1] + num_steps]
        print(f"{name}: {each} requests, {num_steps} steps, every one with a warm entry", flush=True)
    seconds = time.monotonic() - started
    print(
        f"{totals[0]} requests in {len(found)} parts, {totals[1]} steps, {seconds:.0f} s, seed {given.seed}"
    )


def parts(manifest: Manifest, rng: random.Random, num_orders: int) -> Iterator[tuple[str, Subset]]:
    """Yields parts that differ in their limits, with a name each."""
    importance, seen = Importance(manifest), set()
    subsets: list[tuple[str, Sequence[Entry]]] = [
        (name, importance.tier(name)) for name in get_args(TierName)
    ]
    samplers = [entry for entry in manifest.entries if isinstance(entry, SamplerEntry)]
    for number in range(num_orders):
        order = rng.sample(manifest.entries, len(manifest.entries))
        subsets += [
            (f"{share}/4 of order {number}", [*order[: len(order) * share // 4], *samplers])
            for share in (1, 2, 3)
        ]
    for (name, entries), chunks in itertools.product(subsets, get_args(Chunks)):
        part = largest_subset(manifest, entries, chunks)
        if part is not None and (*part.manifest.entries, part.limits) not in seen:
            seen.add((*part.manifest.entries, part.limits))
            yield f"{manifest.spec.model.name}, {name}, {chunks} chunks ({_text(part.limits)})", part


def drive(part: Subset, num_requests: int, rng: random.Random) -> int:
    """Serves requests to their end and returns the number of steps. Raises CoverageError for a step without an entry."""
    limits, warm = part.limits, frozenset(part.manifest.entries)
    scheduler = Scheduler(
        limits,
        BucketTable.from_entries(part.manifest.entries),
        BlockPool(limits.num_blocks),
        policy=rng.choice(["latency", "throughput"]),
        prefix_caching=rng.random() < 0.5,
    )
    num_added = num_steps = 0
    while num_added < num_requests or scheduler.has_work:
        while (
            num_added < num_requests
            and scheduler.num_waiting < 2 * limits.max_num_seqs
            and rng.random() < 0.7
        ):
            scheduler.add(_request(num_added, limits, rng))
            num_added += 1
        scheduled = scheduler.schedule()
        if scheduled is None:
            continue
        step = scheduled.step
        num_steps += 1
        if step.entry not in warm:
            raise SystemExit(f"{step.entry} is not in the subset")
        is_prompt = isinstance(step.entry, PromptEntry)
        scheduler.observe(step.entry, step.entry.query_len * 1e-4 if is_prompt else 4e-4)
        scheduler.complete(scheduled, [None if row.sampling is None else 2 for row in step.rows])
    scheduler.check_integrity()
    return num_steps


def _request(number: int, limits: ServingLimits, rng: random.Random) -> Request:
    most = min(limits.max_model_len, limits.num_blocks * limits.block_size) - 1
    length = rng.choice(
        (
            rng.randint(1, most),
            rng.randint(1, min(most, limits.block_size)),
            int(most * rng.random() ** 3) or 1,
        )
    )
    length = most if rng.random() < 0.01 else length
    params = SamplingParams(max_tokens=min(rng.randint(1, MOST_OUTPUT), limits.max_model_len - length))
    beginning = rng.choice((number, 0))
    prompt = (beginning,) * (length - 1) + (number,)
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        params=params,
        max_tokens=resolve_max_tokens(length, params, limits),
        seed=0,
    )


def _text(limits: ServingLimits) -> str:
    names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_blocks")
    return ", ".join(f"{name} {getattr(limits, name)}" for name in names)


if __name__ == "__main__":
    main()
