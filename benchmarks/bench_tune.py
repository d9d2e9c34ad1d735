"""Tuned buckets on the traces of two Azure services: fitted to the first half of each, judged on the second, replayed.

The traces are AzureLLMInferenceTrace_{conv,code}.csv of github.com/Azure/AzurePublicDataset, as they are or compressed
(Patel et al., Splitwise, ISCA 2024; CC-BY 4.0).
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from random import Random
from typing import Any

import harness
from harness import ROOT, Table, verdict

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.errors import SpecError
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec
from aotgaudi.traffic.cost import WorkModel, device_of
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace, read_trace
from aotgaudi.traffic.tune import Padding, Tuner

LIMITS = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 16384,
    "block_size": 128,
    "num_blocks": 2048,
}
STRATEGIES = ("exponential", "padding_aware", "linear")
PARTS = (0.25, 0.375, 0.5, 0.75, 1.0)
SECONDS, PADDING, WORK, ENTRIES = 30.0, 0.7, 0.7, 0.5


def main() -> None:
    """Measures, prints, writes."""
    args = _arguments()
    machine = harness.environment()
    spec = _spec(args.spec, "exponential")
    measurements: dict[str, Any] = {"limits": LIMITS, "traces": {}}
    tables = []
    for path in args.traces:
        name = path.name.removesuffix(".gz").removesuffix(".csv")
        measurements["traces"][name] = found = {
            str(load): _judged(spec, read_trace(path).faster(load)) for load in args.loads
        }
        tables += [_padding_table(name, load, rows) for load, rows in found.items()]
    measurements["seconds"] = {path.name: _tuning_seconds(spec, read_trace(path)) for path in args.traces}
    if args.traces:
        tables.append(_seconds_table(measurements["seconds"]))
    if args.random_requests:
        measurements["random"] = _random_requests(spec, args.random_requests)
        tables.append(_random_table(measurements["random"]))
    harness.finish("tune", args, machine, measurements, tables)


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("traces", type=Path, nargs="*", help="CSV, .gz or not; none: only random requests")
    parser.add_argument("--spec", type=Path, default=ROOT / "manifests" / "llama-3.1-8b.gaudi3.toml")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0])
    parser.add_argument(
        "--random-requests", type=int, default=0, help="random requests through a tuned table"
    )
    args = parser.parse_args()
    if not args.traces and not args.random_requests:
        parser.error("neither a trace nor --random-requests")
    return args


def _spec(path: Path, strategy: str) -> BuildSpec:
    spec = load_spec(path)
    return spec.model_copy(
        update={
            "limits": spec.limits.model_copy(update=LIMITS),
            "bucketing": spec.bucketing.model_copy(update={"strategy": strategy}),
        }
    )


def _judged(spec: BuildSpec, trace: Trace) -> dict[str, Any]:
    """Every table on the second half, replayed in it; the tuned ones are fitted to the first half."""
    first, second = trace.halves()
    tuner = Tuner(spec, first, WorkModel.of(spec, device_of(spec)))
    rows = []
    for strategy in STRATEGIES:
        bucketing = spec.bucketing.model_copy(update={"strategy": strategy})
        rows.append(
            _row(tuner.replayed(spec.model_copy(update={"bucketing": bucketing}), strategy, second)[0])
        )
    today = rows[0]["num_entries"]
    gaps = {}
    for num in sorted({round(part * today) for part in PARTS}):
        tuned = tuner.tuned(num)
        assert coverage_of(Manifest.of(tuned)).is_closed
        rows.append(_row(tuner.replayed(tuned, f"tuned, {num}", second)[0]))
        gaps[num] = tuner.gap(num)
    return {"rows": rows, "gaps": gaps, "requests": len(second)}


def _row(padding: Padding) -> dict[str, Any]:
    return {
        "name": padding.name,
        "num_entries": padding.num_entries,
        "work": padding.work,
        "needed": padding.needed,
        "share": padding.share,
    }


def _padding_table(name: str, load: str, found: dict[str, Any]) -> Table:
    rows, gaps = found["rows"], found["gaps"]
    today, last = rows[0], rows[-1]
    lines = []
    for row in rows:
        padding, before = row["work"] - row["needed"], today["work"] - today["needed"]
        gap = gaps.get(int(row["name"].partition(", ")[2] or 0))
        lines.append(
            (
                row["name"],
                str(row["num_entries"]),
                f"{row['work'] / 1e15:,.0f}",
                f"{100 * row['share']:.1f} %",
                f"{100 * (row['work'] / today['work'] - 1):+.1f} %",
                f"{100 * (padding / before - 1):+.1f} %",
                "" if gap is None else f"{100 * gap:.1f} %",
            )
        )
    padding = (last["work"] - last["needed"]) / (today["work"] - today["needed"])
    equal = min(
        (row["num_entries"] for row in rows[len(STRATEGIES) :] if row["work"] <= today["work"]),
        default=last["num_entries"],
    )
    note = (
        f"{found['requests']:,} requests. At as many entries: padding x {padding:.2f}, {verdict(padding, PADDING)}; all work"
        f" x {last['work'] / today['work']:.2f}, {verdict(last['work'] / today['work'], WORK)}, where x"
        f" {today['needed'] / today['work']:.2f} is without any padding. At as little work: {equal} entries of"
        f" {today['num_entries']}, {verdict(equal / today['num_entries'], ENTRIES)}."
    )
    columns = (
        "buckets",
        "entries",
        "work, PFLOP",
        "of it padding",
        "work beside",
        "padding beside",
        "gap at most",
    )
    return Table(f"Second half of {name}, at {load} times its rate", columns, tuple(lines), note)


def _tuning_seconds(spec: BuildSpec, trace: Trace) -> dict[str, Any]:
    """One tuning of a whole trace: replay, choice, bound, replay. In seconds of the processor, and of the clock."""
    begun, clock = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.perf_counter()
    tuner = Tuner(spec, trace, WorkModel.of(spec, device_of(spec)))
    collected = time.perf_counter()
    tuned = tuner.tuned(159)
    gap = tuner.gap(159)
    chosen = time.perf_counter()
    tuner.replayed(tuned, "tuned")
    ended = time.perf_counter()
    return {
        "requests": len(trace),
        "steps": tuner.collected.num_steps,
        "collect": collected - clock,
        "choose": chosen - collected,
        "judge": ended - chosen,
        "wall": ended - clock,
        "processor": resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun,
        "gap": gap,
    }


def _seconds_table(found: dict[str, dict[str, Any]]) -> Table:
    rows = tuple(
        (
            name,
            f"{one['requests']:,}",
            f"{one['steps']:,}",
            f"{one['collect']:.1f} s",
            f"{one['choose']:.1f} s",
            f"{one['judge']:.1f} s",
            f"{one['wall']:.1f} s",
            verdict(one["wall"], SECONDS),
        )
        for name, one in found.items()
    )
    columns = ("trace", "requests", "steps", "replay and choices", "bound", "replay", "in all", "target")
    return Table("How long tuning takes, on one core", columns, rows)


def _random_requests(spec: BuildSpec, num: int) -> dict[str, Any]:
    """Random requests through the tables of a hundred random servers: each step has an entry, or the scheduler raises."""
    random, steps, done, servers, begun = Random(0), 0, 0, 0, time.perf_counter()
    while done < num:
        limits = {
            "max_num_seqs": random.randint(1, 48),
            "max_num_batched_tokens": random.randint(128, 1024),
            "max_model_len": random.randint(256, 2048),
            "num_blocks": random.randint(64, 600),
        }
        server = spec.model_copy(update={"limits": spec.limits.model_copy(update=limits)})
        work = WorkModel.of(server, device_of(server))
        try:
            tuned = Tuner(server, _random_trace(random, 50, 512), work).tuned(random.randint(2, 120))
        except SpecError:
            continue
        table = BucketTable.from_entries(enumerate_entries(tuned))
        share = min(num // 100, num - done)
        found = replay(
            _random_trace(random, share, limits["max_model_len"]), server.limits, table, work.seconds
        )
        steps, done, servers = steps + found.num_steps, done + share, servers + 1
    seconds = time.perf_counter() - begun
    return {"requests": done, "servers": servers, "steps": steps, "uncovered": 0, "seconds": seconds}


def _random_trace(random: Random, num: int, longest: int) -> Trace:
    return Trace(
        tuple(sorted(random.random() * num / 20 for _ in range(num))),
        tuple(random.randint(1, random.randint(1, random.randint(1, longest - 1))) for _ in range(num)),
        tuple(random.randint(1, 16) for _ in range(num)),
    )


def _random_table(found: dict[str, Any]) -> Table:
    row = (
        *(f"{found['requests']:,}", str(found["servers"]), f"{found['steps']:,}", str(found["uncovered"])),
        f"{found['seconds']:.0f} s",
    )
    return Table(
        "Random requests through tuned tables",
        ("requests", "servers", "steps", "steps without an entry", "in all"),
        (row,),
    )


if __name__ == "__main__":
    main()
