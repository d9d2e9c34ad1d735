"""Every bucket in random order in a fresh process, the first call of each included.

A server that compiled, or loaded lazily, would show it here: in the first call of a bucket, or in the worst.
Target: p99.9 of a bucket <= 2 x its p50. With fewer than 1,000 steps a bucket p99.9 is the worst step.

Other processes show too. The kernel counts how often it took a core from this process against its will; the
steps where it did not are also reported by themselves, as "undisturbed".
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import harness
import online
from harness import Spread, Table, percentile, verdict

from aotgaudi.engine.steps import Step

TARGET = 2.0


def main() -> None:
    """Measures, prints, writes."""
    args = _arguments()
    machine = harness.environment(args.threads)
    loaded = online.load(args.bundle, args.model, args.threads)
    steps = _steps(loaded, args)
    samples: dict[str, list[tuple[float, int]]] = defaultdict(list)
    started = time.perf_counter()

    def run_all() -> None:
        for label, step in steps:
            switches, before = _involuntary_switches(), time.perf_counter()
            loaded.runner.run(step)
            seconds = time.perf_counter() - before
            samples[label].append((seconds, _involuntary_switches() - switches))

    harness.on_engine_thread(run_all)
    print(f"{len(steps)} steps in {time.perf_counter() - started:.0f} s")
    buckets = {str(e): _bucket(samples[str(e)]) for e in (*loaded.table.prompt, *loaded.table.decode)}
    measurements = {"buckets": buckets, "order": [label for label, _ in steps]}
    harness.finish("steps", args, machine, measurements, _tables(buckets))


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode-steps", type=int, default=200, help="a decode bucket")
    parser.add_argument("--prompt-steps", type=int, default=20, help="a prompt bucket")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _steps(loaded: online.Online, args: argparse.Namespace) -> list[tuple[str, Step]]:
    """All steps, shuffled. They are made beforehand, so that only running them is timed."""
    random = Random(args.seed)
    steps: list[tuple[str, Step]] = []
    for prompt in loaded.table.prompt:
        steps += [(str(prompt), loaded.full_prompt(prompt, random)) for _ in range(args.prompt_steps)]
    for decode in loaded.table.decode:
        steps += [(str(decode), loaded.full_decode(decode, random)) for _ in range(args.decode_steps)]
    random.shuffle(steps)
    return steps


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _bucket(rows: list[tuple[float, int]]) -> dict[str, Any]:
    samples = [seconds for seconds, _ in rows]
    undisturbed = [seconds for seconds, switches in rows if not switches]
    spread, worst = Spread(tuple(samples)), percentile(samples, 0.999)
    return {
        **spread.json(),
        "involuntary_switches": [switches for _, switches in rows],
        "num_undisturbed": len(undisturbed),
        "undisturbed_p99.9_to_p50": percentile(undisturbed, 0.999) / spread.median if undisturbed else None,
        "first": samples[0],
        "p99": percentile(samples, 0.99),
        "p99.9": worst,
        "first_to_p50": samples[0] / spread.median,
        "p99.9_to_p50": worst / spread.median,
    }


def _tables(buckets: dict[str, dict[str, Any]]) -> list[Table]:
    rows = tuple(
        (
            label,
            str(b["n"]),
            *(f"{b[name] * 1e3:.1f}" for name in ("median", "p99", "p99.9", "max", "first")),
            f"{b['first_to_p50']:.2f}",
            f"{b['p99.9_to_p50']:.2f}",
            str(b["num_undisturbed"]),
        )
        for label, b in buckets.items()
    )
    columns = (
        "bucket",
        "steps",
        "p50 ms",
        "p99",
        "p99.9",
        "max",
        "first",
        "first/p50",
        "p99.9/p50",
        "undisturbed",
    )
    first, worst = (max(b[name] for b in buckets.values()) for name in ("first_to_p50", "p99.9_to_p50"))
    calm = [b["undisturbed_p99.9_to_p50"] for b in buckets.values() if b["num_undisturbed"]]
    num_calm = sum(b["num_undisturbed"] for b in buckets.values())
    count = sum(b["p99.9_to_p50"] <= TARGET for b in buckets.values())
    summary = (
        ("worst first call / p50", f"{first:.2f}", ""),
        ("worst p99.9 / p50", f"{worst:.2f}", verdict(worst, TARGET)),
        (f"the same of {num_calm} undisturbed steps", f"{max(calm):.2f}" if calm else "-", ""),
        (f"buckets with p99.9 <= {TARGET:g} x p50", f"{count} of {len(buckets)}", ""),
    )
    note = "Random order, fresh process, nothing left out; greedy sampling included."
    return [
        Table("First-seen shapes", ("measure", "value", "target"), summary, note),
        Table("First-seen shapes, by bucket", columns, rows),
    ]


if __name__ == "__main__":
    main()
