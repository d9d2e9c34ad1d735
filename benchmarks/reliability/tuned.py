"""Random requests to random servers with tuned buckets, through the real scheduler, no device: every step has an entry.

Each server has random limits, and buckets that were tuned to another random trace. The scheduler raises at the first step
without an entry. Needs neither torch nor a built store::

    python benchmarks/reliability/tuned.py manifests/smollm2-135m.cpu.toml --requests 1000000
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec
from aotgaudi.traffic.cost import WorkModel, device_of
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace
from aotgaudi.traffic.tune import Tuner

_SERVERS = 100


def main() -> None:
    """Prints what was served; a traceback names the step that has no entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began, spec, random = time.perf_counter(), load_spec(args.spec), Random(args.seed)
    num_steps = num_requests = num_servers = 0
    while num_requests < args.requests:
        share = min(max(1, args.requests // _SERVERS), args.requests - num_requests)
        steps = _serve(spec, random, share)
        if steps is not None:
            num_steps, num_requests, num_servers = num_steps + steps, num_requests + share, num_servers + 1
    seconds = time.perf_counter() - began
    print(
        f"{num_requests:,} requests to {num_servers} servers in {num_steps:,} steps,"
        f" 0 without an entry; {seconds:.0f} s (--seed {args.seed})"
    )


def _serve(spec: BuildSpec, random: Random, num_requests: int) -> int | None:
    """Returns the number of steps; None where the drawn limits are not those of a server."""
    limits = {
        "max_num_seqs": random.randint(1, 48),
        "max_num_batched_tokens": random.randint(128, 1024),
        "max_model_len": random.randint(256, 2048),
        "num_blocks": random.randint(64, 600),
    }
    server = spec.model_copy(update={"limits": spec.limits.model_copy(update=limits)})
    work = WorkModel.of(server, device_of(server))
    try:
        tuned = Tuner(server, _trace(random, 50, 512), work).tuned(random.randint(2, 120))
    except SpecError:
        return None
    table = BucketTable.from_entries(enumerate_entries(tuned))
    trace = _trace(random, num_requests, limits["max_model_len"])
    return replay(trace, server.limits, table, work.seconds).num_steps


def _trace(random: Random, num: int, longest: int) -> Trace:
    return Trace(
        tuple(sorted(random.random() * num / 20 for _ in range(num))),
        tuple(random.randint(1, random.randint(1, random.randint(1, longest - 1))) for _ in range(num)),
        tuple(random.randint(1, 16) for _ in range(num)),
    )


if __name__ == "__main__":
    main()
