"""Many builders on one empty store: every unit is compiled once, and nobody ever reads half of anything.

Each round starts builders (processes, each with workers of its own) on a store that has texts and no artifacts, while
readers look every key up all the time and re-hash what they are given. The fake backend's journal says what was compiled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aotgaudi.compile.keys import UnitRow, read_rows
from aotgaudi.errors import AotGaudiError
from aotgaudi.store.records import RecordError
from aotgaudi.store.store import Store
from tests.workload import Workload, execute

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Round:
    """What one round gave. `most`: how often the unit that was compiled most often was."""

    units: int
    compiles: int
    most: int
    done_builders: int
    reads: int
    torn: int
    seconds: float

    def is_good(self, builders: int) -> bool:
        return (
            self.units == self.compiles
            and self.most == 1
            and self.torn == 0
            and self.done_builders == builders
        )


def labels(units: int) -> tuple[tuple[str, ...], ...]:
    """Units of three programs, which share some; every fourth takes 0.2 s."""
    names = [f"layer {n}{' !slow' if n % 4 == 0 else ''}" for n in range(units)]
    third = units // 3
    return tuple(names[: 2 * third]), tuple(names[third:]), tuple(names[::2])


def build(root: Path, work: Workload, workers: int, start: Event, results: Any) -> None:
    store = Store.open(root)
    plan = work.plan(store)
    start.wait()
    with store.in_use():
        outcome = execute(store, plan, workers)
    is_done = not outcome.failures and not outcome.interrupted and work.plan(store).is_complete
    results.put(("builder", len(outcome.compiled), int(is_done)))


def read(root: Path, work: Workload, stop: Event, results: Any) -> None:
    """Looks every key up again and again. Torn: a record that is none, or a row whose objects do not verify."""
    store, keys = Store.open(root), tuple(work.unit_keys)
    reads = torn = 0
    while not stop.is_set():
        for key in keys:
            reads += 1
            torn += is_torn(store, key)
        time.sleep(0.02)
    results.put(("reader", reads, torn))


def is_torn(store: Store, key: str) -> bool:
    try:
        value = store.actions.records.load(key)
        row = read_rows(UnitRow, store, (key,)).get(key)
        if value is not None and row is None:
            return True
        for digest in row.digests() if row else ():
            store.objects.verify(digest)
    except (RecordError, AotGaudiError):
        return True
    return False


def run_round(folder: Path, builders: int, readers: int, workers: int, units: int) -> Round:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    work = Workload(labels(units), folder / "journal")
    store = Store.open(folder / "store")
    work.seed(store)
    start, stop, results = FORK.Event(), FORK.Event(), FORK.Queue()
    building = [
        FORK.Process(target=build, args=(store.root, work, workers, start, results)) for _ in range(builders)
    ]
    reading = [FORK.Process(target=read, args=(store.root, work, stop, results)) for _ in range(readers)]
    for process in (*building, *reading):
        process.start()
    began = time.perf_counter()
    start.set()
    outcomes = [results.get(timeout=600) for _ in building]
    seconds = time.perf_counter() - began
    stop.set()
    seen = [results.get(timeout=600) for _ in reading]
    for process in (*building, *reading):
        process.join()
    done = sum(is_done for _, _, is_done in outcomes)
    compiles = work.compiles()
    return Round(
        units=len(work.unit_keys),
        compiles=compiles.total(),
        most=max(compiles.values(), default=0),
        done_builders=done if sum(n for _, n, _ in outcomes) == len(work.unit_keys) else 0,
        reads=sum(reads for _, reads, _ in seen),
        torn=sum(torn for _, _, torn in seen),
        seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--builders", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1, help="of each builder [default: 1]")
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--store-parent", type=Path, help="where the stores lie, e.g. a shared directory")
    parser.add_argument("--json", type=Path, help="file for the outcome")
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="aotgaudi-builders-", dir=args.store_parent) as folder:
        for number in range(args.rounds):
            rounds.append(
                run_round(Path(folder) / "round", args.builders, args.readers, args.workers, args.units)
            )
            print(f"round {number + 1}: {rounds[-1]}", flush=True)
    bad = [each for each in rounds if not each.is_good(args.builders)]
    print(
        f"{args.builders} builders x {args.rounds} rounds: {sum(r.compiles for r in rounds)} compiles of "
        f"{sum(r.units for r in rounds)} units, {sum(r.reads for r in rounds)} reads by {args.readers} readers, "
        f"{sum(r.torn for r in rounds)} torn; {len(bad)} bad rounds"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in rounds], indent=1), encoding="utf-8")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
