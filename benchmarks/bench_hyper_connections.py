"""Classes of hyper-connections on a CPU: what the first step of each costs, and what splitting sums costs.

* **No stall.** The first step of each class after ready against the median of the next 20.
* **KV blocks.** The decode step of the bundle, filled, with 20 and with 20,000 KV blocks, in turn.
* **Splits.** ``hc_pre`` of DeepSeek V4 Flash's width (K = 16384) in float32, compiled, by partial sums, tokens and threads.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import harness
import torch
from harness import Table
from online import Online

from aotgaudi.backends.base import Unit
from aotgaudi.backends.offline import make_compiler, probe_target
from aotgaudi.backends.online import make_runtime
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.bundle.verify import hold_bundle
from aotgaudi.compile.keys import unit_key
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.entries import DecodeEntry, PromptEntry, StepEntry
from aotgaudi.graphs.hyper_connections import class_text
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.load import Artifacts, Loader
from aotgaudi.runtime.weights import ShardReader
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.spec.target import TargetSpec

FLASH = HyperConnections(4, 4096, 20, 1e-6, 1e-6)
SPLITS, TOKENS = (1, 2, 4, 16, 64), (1, 64, 512)
NEXT = 20


def main() -> None:
    """Measures, prints, writes."""
    args = _arguments()
    machine = harness.environment([1, *({args.threads} - {1})])
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work) as scratch:
        stalls = _stalls(args)
        blocks = _by_blocks(args)
        splits = _by_splits(args, Path(scratch))
    measurements = {"stalls": stalls, "blocks": blocks, "splits": splits}
    harness.finish("hyper-connections", args, machine, measurements, _tables(measurements))


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="scratch")
    return parser.parse_args()


# The first step of a class


def _stalls(args: argparse.Namespace) -> dict[str, list[float]]:
    steps = _steps_by_class(open_bundle(args.bundle).manifest)
    with harness.serving(args.bundle, args.model, 1) as server:
        return {
            str(n): [_one_step(server, entry, turn) for turn in range(NEXT + 1)] for n, entry in steps.items()
        }


def _steps_by_class(manifest: Manifest) -> dict[int, StepEntry]:
    """One step for each class, those with fewest tokens first."""
    splits = StepSplits.of(manifest.spec)
    assert splits is not None
    entries = [entry for entry in manifest.entries if isinstance(entry, (PromptEntry, DecodeEntry))]
    found: dict[int, StepEntry] = {}
    for entry in sorted(entries, key=lambda entry: entry.num_tokens):
        found.setdefault(splits.of_entry(entry), entry)
    return found


def _one_step(server: harness.Server, entry: StepEntry, turn: int) -> float:
    """Returns the seconds of a step of `entry`, that a request of random tokens takes."""
    length = 8 if isinstance(entry, DecodeEntry) else entry.query_len - 8
    body = {
        "prompt": Random(turn * 1000 + length).choices(range(5, 400), k=length),
        "max_tokens": 2 if isinstance(entry, DecodeEntry) else 1,
        "temperature": 0,
        "ignore_eos": True,
    }
    before = _seconds(server, entry)
    server.post("/v1/completions", body)
    return _seconds(server, entry) - before


def _seconds(server: harness.Server, entry: StepEntry) -> float:
    bucket = ",".join(map(str, entry.row()))
    labels = rf"(?=.*kind=\"{entry.kind}\")(?=.*bucket=\"{bucket}\")"
    sample = re.compile(rf"aotgaudi_entry_step_seconds_sum\{{{labels}.*\}} (\S+)")
    found = sample.search(server.get("/metrics"))
    return float(found[1]) if found else 0.0


# KV blocks


def _by_blocks(args: argparse.Namespace) -> dict[str, float]:
    bundle = open_bundle(args.bundle)
    manifest = bundle.manifest
    entry = next(entry for entry in manifest.entries if isinstance(entry, DecodeEntry))
    runners = {}
    for num_blocks in (20, 20_000):
        table = ExecutableTable()
        reader = ShardReader(ModelDirectory(args.model))
        held = hold_bundle(bundle)
        artifacts = Artifacts(bundle.require_programs(), held.program, held.read, held.path)
        Loader(make_runtime(bundle.require_programs().target), reader, num_blocks).load(
            [entry], artifacts, table
        )
        runners[num_blocks] = ProgramRunner(table, manifest.spec.limits.block_size, num_threads=1)
    online = Online(manifest, BucketTable.from_entries(manifest.entries), runners[20], args.model)
    step = online.full_decode(entry, Random(0))
    torch.set_num_threads(1)
    found = _in_turn({str(n): lambda r=runner: r.logits(step) for n, runner in runners.items()}, 100)
    return {name: min(seconds) for name, seconds in found.items()}


# Splits


def _by_splits(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    target = probe_target(TargetSpec())
    runtime, compiler = make_runtime(target), make_compiler(target)
    units, rows = {}, []
    for n_splits in SPLITS:
        text = class_text(FLASH, n_splits, torch.float32)
        folder = scratch / f"splits-{n_splits}"
        folder.mkdir()
        compiled = compiler.compile(Unit(text, unit_key(text, target), f"hc_pre {n_splits}"), folder)
        units[n_splits] = runtime.load(compiled.files).run
        rows.append({"n_splits": n_splits, "compile_seconds": compiled.compile_seconds})
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((24, 4 * 4096), (3,), (24,))]
    for threads in sorted({1, args.threads}):
        torch.set_num_threads(threads)
        for tokens in TOKENS:
            streams = torch.randn(1, tokens, 4, 4096, generator=generator)
            calls = {str(n): lambda run=run, x=streams: run([x, *weights]) for n, run in units.items()}
            for row, seconds in zip(rows, _in_turn(calls, 60).values(), strict=True):
                row[f"{tokens} tokens, {threads} threads"] = min(seconds)
    return rows


def _in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each call, alternating, after three of each that do not count."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if number >= 3:
                found[name].append(time.perf_counter() - begin)
    return found


def _tables(found: dict[str, Any]) -> list[Table]:
    stalls = [
        (f"{n} parts", _ms(seconds[0]), _ms(median(seconds[1:]))) for n, seconds in found["stalls"].items()
    ]
    blocks = ((f"{int(n):,}", _ms(seconds)) for n, seconds in found["blocks"].items())
    columns = tuple(found["splits"][0])[2:]
    splits = (
        (str(row["n_splits"]), f"{row['compile_seconds']:.1f} s", *(_ms(row[name]) for name in columns))
        for row in found["splits"]
    )
    first = ("class", "first step", f"median of the next {NEXT}")
    return [
        Table("First step of a class", first, tuple(stalls), "One request each."),
        Table(
            "Decode step by KV blocks",
            ("blocks", "least"),
            tuple(blocks),
            "The least of 100, in turn, one thread.",
        ),
        Table(
            "hc_pre, K = 16384, float32",
            ("parts", "compile", *columns),
            tuple(splits),
            "The least of 60 calls, in turn.",
        ),
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms" if seconds < 1 else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
