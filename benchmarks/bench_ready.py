"""Time to ready: from the start of the process to the first 200 of /ready, with --require-warm.

Three comparisons, each alternating in one run:

* the floor (floor.py): what any server must do (imports, mapping, hashing, tokenizer). Target: ready <= 1.5 x
  of it.
* the same start where everything has to be compiled first, into an empty store. Target: >= 20 x ready.
* many buckets against one bucket of the tiny model (--many-one). Target: within 10 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import tiny
from harness import ROOT, Spread, Table, verdict

FLOOR_TARGET, COLD_TARGET, MANY_TARGET = 1.5, 20.0, 1.1


def main() -> None:
    """Measures, prints, writes."""
    args = _arguments()
    machine = harness.environment(args.threads)
    with ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aotgaudi-bench-")))
        work.mkdir(parents=True, exist_ok=True)
        measurements, tables = measure_ready(args, work)
        if args.many_one or args.bundle_many or args.bundle_one:
            more, table = measure_many_one(args, work)
            measurements["many_one"] = more
            tables.append(table)
    harness.finish("ready", args, machine, measurements, tables)


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    cold = parser.add_mutually_exclusive_group()
    cold.add_argument("--cold-seconds", type=float, help="what `build cache` took from an empty store")
    cold.add_argument("--measure-cold", action="store_true", help="measure that now (minutes)")
    parser.add_argument("--jobs", type=int, default=2, help="workers of every build")
    parser.add_argument(
        "--many-one", action="store_true", help="compare many buckets with one (builds: minutes)"
    )
    parser.add_argument("--bundle-many", type=Path)
    parser.add_argument("--bundle-one", type=Path)
    parser.add_argument("--tiny-model", type=Path, help="the model of both [default: made]")
    parser.add_argument(
        "--work", type=Path, help="keeps what is built, for the next run [default: a temporary one]"
    )
    return parser.parse_args()


def measure_ready(args: argparse.Namespace, work: Path) -> tuple[dict[str, Any], list[Table]]:
    """Ready against the floor, alternating, and against a cold start."""
    subject = args.bundle, args.model, args.threads
    run_floor(*subject)  # Fills the page cache; not counted.
    run_start(*subject)
    floors, readies = [], []
    for _ in range(args.runs):
        floors.append(run_floor(*subject))
        readies.append(run_start(*subject))
    floor, ready = Spread(tuple(floors)), Spread(tuple(readies))
    ratio = ready.median / floor.median
    rows = [
        ("floor", f"{floor.text()} s", "1.00", ""),
        ("ready", f"{ready.text()} s", f"{ratio:.2f} x floor", verdict(ratio, FLOOR_TARGET)),
    ]
    measurements: dict[str, Any] = {"floor": floor.json(), "ready": ready.json(), "ready_to_floor": ratio}
    build = measure_cold(args, work) if args.measure_cold else args.cold_seconds
    if build is not None:
        cold = build + ready.median
        measurements |= {"build_seconds": build, "cold_seconds": cold, "cold_to_ready": cold / ready.median}
        speedup = cold / ready.median
        target = verdict(speedup, COLD_TARGET, at_least=True)
        rows.append(("cold: compile, then start", f"{cold:.1f} s", f"{speedup:.0f} x ready", target))
    note = f"{args.runs} starts of each, alternating, after one of each to fill the page cache; process start to /ready."
    return measurements, [
        Table("Time to ready", ("start", "median (min to max)", "ratio", "target"), tuple(rows), note)
    ]


def run_floor(bundle: Path, model: Path, threads: int) -> float:
    """Returns the seconds from the start of the floor's process to its printed line."""
    command = [sys.executable, ROOT / "benchmarks" / "floor.py", bundle.resolve(), model.resolve()]
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=harness.process_environment(threads)
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
    if not line or process.returncode:
        sys.exit(f"the floor ended with {process.returncode}")
    return seconds


def run_start(bundle: Path, model: Path, threads: int) -> float:
    """Returns the seconds from the start of a server's process to its first 200 of /ready."""
    with harness.serving(bundle, model, threads) as server:
        return server.ready_seconds


def measure_cold(args: argparse.Namespace, work: Path) -> float:
    """Compiles all of the bundle's manifest into an empty store. Returns the seconds of the whole process."""
    with tempfile.TemporaryDirectory(prefix="cold-", dir=work) as store:
        manifest = (args.bundle / "manifest.json").resolve()
        options = ["--store", store, "-j", str(args.jobs), "--json"]
        return harness.run(harness.command("build", "cache", manifest, *options))[0]


def measure_many_one(args: argparse.Namespace, work: Path) -> tuple[dict[str, Any], Table]:
    """Starts of the tiny model with many buckets and with one, alternating."""
    model = args.tiny_model or _tiny_model(work / "tiny-model")
    bundles = {
        "many": args.bundle_many or build_tiny("many", work, args.jobs),
        "one": args.bundle_one or build_tiny("one", work, args.jobs),
    }
    samples: dict[str, list[float]] = {which: [] for which in bundles}
    for number in range(args.runs + 1):
        for which, bundle in bundles.items():
            seconds = run_start(bundle, model, args.threads)
            if number:  # The first fills the page cache.
                samples[which].append(seconds)
    many, one = Spread(tuple(samples["many"])), Spread(tuple(samples["one"]))
    ratio = many.median / one.median
    counts = {which: count_entries(bundle) for which, bundle in bundles.items()}
    rows = (
        (counts["one"], f"{one.text()} s", "1.00", ""),
        (counts["many"], f"{many.text()} s", f"{ratio:.2f}", verdict(ratio, MANY_TARGET)),
    )
    measured = {"many": many.json(), "one": one.json(), "many_to_one": ratio, "entries": counts}
    columns = ("entries", "median (min to max)", "ratio", "target")
    note = f"{args.runs} starts of each, alternating; tiny model, equally large KV caches."
    return measured, Table("Time to ready: many buckets and one", columns, rows, note)


def build_tiny(which: str, work: Path, jobs: int) -> Path:
    """Builds a bundle of the tiny model under `work`; does nothing where it is built."""
    spec, bundle = tiny.write_spec(which, work), work / f"tiny-llama.{which}.bundle"
    options: list[str | Path] = ["--store", work / "store", "-j", str(jobs), "-o", bundle]
    seconds, text = harness.run(harness.command("build", spec, *options))
    print(f"{text}built in {seconds:.1f} s", flush=True)
    return bundle


def count_entries(bundle: Path) -> str:
    """``42 prompt + 37 decode buckets, 95 entries``."""
    from aotgaudi.manifest.manifest import loads

    manifest = loads((bundle / "manifest.json").read_bytes())
    prompt, decode = (len(manifest.of_kind(kind)) for kind in ("prompt", "decode"))
    return f"{prompt} prompt + {decode} decode buckets, {len(manifest.entries)} entries"


def _tiny_model(folder: Path) -> Path:
    return folder if (folder / "config.json").exists() else tiny.write_model(folder)


if __name__ == "__main__":
    main()
