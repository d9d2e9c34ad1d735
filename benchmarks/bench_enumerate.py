"""Enumeration: tables in process beside the public code's seconds, and a whole manifest of a million entries."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from harness import ROOT, Spread, Table, verdict

from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.from_vllm.buckets import BucketingEnvironment

TIMINGS = ROOT / "tests" / "golden" / "data" / "bucketing" / "enumeration_timing.jsonl"
EXPONENTIAL_SECONDS, LINEAR_SECONDS, MANIFEST_SECONDS, QUADRATIC_SECONDS = 0.001, 0.25, 15.0, 3.0
MANIFEST_BYTES = 1.5e9
QUICK_SECONDS, QUICK_RUNS = 0.02, 50
LONG = 131072

QUADRATIC = {
    "version": "vllm-hpu-extension@8211e0b",
    "env": {"VLLM_EXPONENTIAL_BUCKETING": "false"},
    "prefix_caching": True,
    "inputs": {
        "max_num_seqs": 256,
        "max_num_prefill_seqs": 1,
        "block_size": 128,
        "max_num_batched_tokens": LONG,
        "max_model_len": LONG,
        "num_hpu_blocks": 5746,
    },
}
"""Quadratic upstream, where it is not among the timings: 9.6 s at 32K, by which 128K takes about 40 minutes."""

SPEC = f"""
schema = "aotgaudi.spec/1"
[model]
name = "llama-3.1-8b"
dtype = "bfloat16"
config = "{ROOT / "manifests" / "configs" / "llama-3.1-8b.json"}"
[limits]
max_num_seqs = 256
max_num_batched_tokens = {LONG}
max_model_len = {LONG}
block_size = 128
num_blocks = 5746
[bucketing]
strategy = "linear"
coverage = "upstream"
"""

WORKER = """
import json, resource, sys, time
from pathlib import Path
from aotgaudi.manifest.manifest import read_manifest, write_manifest
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
spec, path, reads = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "read"
seconds, started = {}, time.perf_counter()
def lap(name):
    global started
    now = time.perf_counter()
    seconds[name], started = now - started, now
if reads:
    manifest = read_manifest(path); lap("read and check")
else:
    manifest = Manifest.of(load_spec(spec)); lap("entries")
    manifest.id; lap("hash")
    write_manifest(path, manifest); lap("file")
    ids = {entry.id for entry in manifest.entries}; lap("entry ids")
    assert len(ids) == len(manifest.entries)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "entries": len(manifest.entries)}))
"""
"""One step a lap, in a process of its own, whose peak of memory it tells."""


def main() -> None:
    """Measures, prints, writes."""
    args = _arguments()
    machine = harness.environment()
    rows = [json.loads(line) for line in args.timings.read_text(encoding="utf-8").splitlines()]
    timed = [(row, _table_seconds(row, args.runs)) for row in rows]
    quadratic = _table_seconds(QUADRATIC, args.runs)
    written, read = _whole_manifest(args.runs)
    measurements = {
        "tables": [{**row, "seconds": spread.json()} for row, spread in timed],
        "quadratic": quadratic.json(),
        "manifest": written,
        "read": read,
    }
    tables = (_targets(timed, quadratic, written, read), _steps(written, read), _configurations(timed))
    harness.finish("enumerate", args, machine, measurements, tables)


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument(
        "--timings", type=Path, default=TIMINGS, help="seconds of the public code, a row a line"
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="of each long measurement; short ones run more often"
    )
    return parser.parse_args()


# Tables, in this process


def _table_seconds(row: dict[str, Any], runs: int) -> Spread:
    """Seconds of both phases' tables; exits where they are not as many buckets as the public code gave."""
    make = _tables_of(row)
    first, counts = _timed(make)
    if "prompt_n" in row and counts != (row["prompt_n"], row["decode_n"]):
        sys.exit(f"{row['version']} {row['strategy']}: {counts} buckets, the public code has others: {row}")
    repeats = QUICK_RUNS if first < QUICK_SECONDS else runs
    return Spread(tuple(_timed(make)[0] for _ in range(repeats)))


def _timed(make: Callable[[], tuple[int, int]]) -> tuple[float, tuple[int, int]]:
    started = time.perf_counter()
    counts = make()
    return time.perf_counter() - started, counts


def _tables_of(row: dict[str, Any]) -> Callable[[], tuple[int, int]]:
    environment = BucketingEnvironment.parse(
        row["env"], row["version"], enable_prefix_caching=row["prefix_caching"]
    )
    numbers = {"num_blocks" if name == "num_hpu_blocks" else name: n for name, n in row["inputs"].items()}
    inputs = BucketingInputs(
        **numbers,
        contiguous_pa=environment.contiguous_pa,
        prefix_caching=environment.prefix_caching,
        prompt=environment.prompt,
        decode=environment.decode,
    )
    strategy = find_strategy(row["version"], environment.strategy)
    return lambda: (len(strategy.prompt_table(inputs)), len(strategy.decode_table(inputs)))


# The whole manifest, in processes of its own


def _whole_manifest(runs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What each run of writing, and of reading back, needed."""
    with tempfile.TemporaryDirectory(prefix="aotgaudi-bench-") as folder:
        spec, path = Path(folder) / "long.toml", Path(folder) / "long.manifest.json"
        spec.write_text(SPEC, encoding="utf-8")
        written = [_work(spec, path, "write") for _ in range(runs)]
        return written, [_work(spec, path, "read") for _ in range(runs)]


def _work(spec: Path, path: Path, what: str) -> dict[str, Any]:
    _, text = harness.run([sys.executable, "-c", WORKER, str(spec), str(path), what])
    result: dict[str, Any] = json.loads(text)
    return result


# What is printed

Timed = list[tuple[dict[str, Any], Spread]]


def _targets(
    timed: Timed, quadratic: Spread, written: list[dict[str, Any]], read: list[dict[str, Any]]
) -> Table:
    newest = [(row, spread) for row, spread in timed if row["version"] == "vllm-gaudi@091bbad"]
    at_long = [(row, spread) for row, spread in newest if row["inputs"]["max_model_len"] == LONG]
    exponential = max(
        (spread for row, spread in at_long if row["strategy"] == "exp"), key=lambda spread: spread.median
    )
    linear_row, linear = next(
        (row, spread)
        for row, spread in at_long
        if row["strategy"] == "lin" and row["inputs"]["max_num_batched_tokens"] == LONG
    )
    public = linear_row["prompt_s"] + linear_row["decode_s"]
    totals, reads = _totals(written), _totals(read)
    peak = max(run["peak_bytes"] for run in (*written, *read))
    rows = (
        ("exponential tables, the slowest at 131072", f"{exponential.text(3, 1e3)} ms", "0.4 to 0.7 ms",
         verdict(exponential.median * 1e3, EXPONENTIAL_SECONDS * 1e3)),
        (f"linear tables at 131072, {linear_row['prompt_n'] + linear_row['decode_n']:,} buckets",
         f"{linear.text(3)} s", f"{public:.2f} s", verdict(linear.median, LINEAR_SECONDS)),
        ("8211e0b linear with prefix caching at 131072", f"{quadratic.text(3)} s", "about 40 min, quadratic",
         verdict(quadratic.median, QUADRATIC_SECONDS)),
        (f"whole manifest, {written[0]['entries']:,} entries", f"{totals.text()} s", "has none",
         verdict(totals.median, MANIFEST_SECONDS)),
        ("reading it back", f"{reads.text()} s", "has none", ""),
        ("peak memory of either, GB", f"{peak / 1e9:.2f}", "", verdict(peak / 1e9, MANIFEST_BYTES / 1e9)),
    )  # fmt: skip
    note = "Tables: in process, both phases. Manifest: entries, their ids, hash and file, in a fresh process."
    return Table("Enumeration", ("what", "median (min to max)", "public code", "target"), rows, note)


def _totals(runs: list[dict[str, Any]]) -> Spread:
    return Spread(tuple(sum(run["seconds"].values()) for run in runs))


def _steps(written: list[dict[str, Any]], read: list[dict[str, Any]]) -> Table:
    rows = tuple(
        (name, f"{Spread(tuple(run['seconds'][name] for run in runs)).text()} s")
        for runs in (written, read)
        for name in runs[0]["seconds"]
    )
    return Table("The whole manifest, step by step", ("step", "median (min to max)"), rows)


def _configurations(timed: Timed) -> Table:
    rows = tuple(_configuration(row, spread) for row, spread in timed)
    columns = ("version", "strategy", "T, M, P, S, N", "modes", "buckets", "public, ms", "ours, ms", "ratio")
    note = (
        "T max_num_batched_tokens, M max_model_len, P prefill sequences, S sequences, N blocks. Public: the public"
        " code's seconds as recorded with the golden tables, not on this machine at this time."
    )
    return Table("Every configuration of the recorded timings", columns, rows, note)


def _configuration(row: dict[str, Any], spread: Spread) -> tuple[str, ...]:
    names = (
        "max_num_batched_tokens",
        "max_model_len",
        "max_num_prefill_seqs",
        "max_num_seqs",
        "num_hpu_blocks",
    )
    public = row["prompt_s"] + row["decode_s"]
    contiguous = row["env"].get("VLLM_CONTIGUOUS_PA")
    modes = "" if row["prefix_caching"] else "no prefix caching"
    if contiguous == "true":
        modes += ", contiguous" if modes else "contiguous"
    return (
        row["version"],
        row["strategy"],
        ", ".join(str(row["inputs"][name]) for name in names),
        modes,
        f"{row['prompt_n']:,} + {row['decode_n']:,}",
        f"{public * 1e3:.2f}",
        spread.text(2, 1e3),
        f"{public / spread.median:.1f}",
    )


if __name__ == "__main__":
    main()
