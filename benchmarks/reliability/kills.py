"""SIGKILL at random moments of builds: nothing wrong is ever reported warm, and the next run goes on by itself.

A builder and its workers, one process group, are killed whole. Then, with no clean-up, another process plans: what the
plan calls warm must be there, verify, and be the very bytes that the compiler gives; every record must be readable; and
no more units may have been begun in vain than there were workers. The next build starts on what was left, and is killed in
its turn; after some kills one may finish, and must have everything. A seed repeats the moments (the system's timing
differs).

``--real N`` does the same to the CPU backend through the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.compile.plan import Plan
from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import AotGaudiError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.records import RecordError
from aotgaudi.store.store import Store
from tests.workload import Workload, execute

FORK = multiprocessing.get_context("fork")
DEADLINE_SECONDS = 120.0
KILLS_A_STORE = 8
REAL_SPEC = Path(__file__).resolve().parent / "tiny-llama.toml"


@dataclass
class Tally:
    """What was seen. All but the first four, and `redone`, must stay 0."""

    kills: int = 0
    finished_runs: int = 0
    units_compiled: int = 0
    objects_verified: int = 0
    redone: int = 0
    wrong_but_warm: int = 0
    unreadable_records: int = 0
    bad_objects: int = 0
    redone_beyond_flight: int = 0
    unfinished_runs: int = 0
    left_in_tmp: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (
            self.wrong_but_warm
            + self.unreadable_records
            + self.bad_objects
            + self.redone_beyond_flight
            + self.unfinished_runs
            + self.left_in_tmp
        )


class Builds:
    """Builds with the fake backend, one store after the other."""

    def __init__(self, folder: Path, rng: random.Random, tally: Tally, *, workers: int, units: int) -> None:
        self.folder, self.rng, self.tally, self.workers = folder, rng, tally, workers
        self.labels = tuple(f"layer {n}{' !slow' if n % 16 == 7 else ''}" for n in range(units))
        self._renew(0)

    def run(self, kills: int) -> None:
        stores = 0
        while self.tally.kills < kills:
            stores += 1
            self._renew(stores)
            target = min(kills, self.tally.kills + KILLS_A_STORE)
            while self.tally.kills < target and not self.work.plan(self.store).is_complete:
                self.kill_one()
            self.finish()

    def kill_one(self) -> None:
        """Starts a build, kills it at a random moment, and looks at what it left."""
        before = self.work.compiles().total()
        warm_before = len(self.work.plan(self.store).units)
        process = self._start()
        if self.rng.random() < 0.9:
            self._wait_for_work(process, before)
            time.sleep(self.rng.uniform(0, 0.35))
        else:
            time.sleep(self.rng.uniform(0, 0.6))
        kill_group(process.pid)
        process.join()
        self.tally.kills += process.exitcode == -signal.SIGKILL
        plan = self.work.plan(self.store)
        self.check(plan)
        redone = self.work.compiles().total() - before - (len(plan.units) - warm_before)
        self.tally.redone += redone
        if not 0 <= redone <= self.workers:
            self.tally.redone_beyond_flight += 1
            self.tally.notes.append(f"kill {self.tally.kills}: {redone} units begun in vain")

    def finish(self) -> None:
        """Lets a build run to its end on what was left."""
        process = self._start()
        process.join(DEADLINE_SECONDS)
        plan = self.work.plan(self.store)
        self.check(plan)
        self.tally.finished_runs += 1
        self.tally.units_compiled += len(plan.units)
        if process.exitcode != 0 or not plan.is_complete:
            self.tally.unfinished_runs += 1
            self.tally.notes.append(
                f"a run after {self.tally.kills} kills did not finish ({process.exitcode})"
            )
        self.tally.left_in_tmp += sum(1 for _ in (self.store.root / "tmp").iterdir())

    def check(self, plan: Plan) -> None:
        """Everything that is there is right, or is not called warm."""
        check_store(self.store, plan, self.tally)
        for key, row in plan.units.items():
            text = f"graph of {self.work.unit_keys[key]}".encode()
            right = b"aotgaudi.fake/1\n" + sha256_bytes(text).encode() * 64
            self.tally.wrong_but_warm += row.artifact != {"unit.bin": Digest.of(right)}

    def _renew(self, number: int) -> None:
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        self.work = Workload((self.labels,), self.folder / f"journal-{number}")
        self.store = Store.open(self.folder / "store")
        self.work.seed(self.store)

    def _start(self) -> multiprocessing.process.BaseProcess:
        process = FORK.Process(target=build, args=(self.store.root, self.work, self.workers))
        process.start()
        return process

    def _wait_for_work(self, process: multiprocessing.process.BaseProcess, before: int) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while process.is_alive() and self.work.compiles().total() == before and time.monotonic() < deadline:
            time.sleep(0.002)


def build(root: Path, work: Workload, workers: int) -> None:
    """What `aotgaudi build cache` does, in a process group of its own."""
    os.setsid()
    store = Store.open(root)
    with store.in_use():
        outcome = execute(store, work.plan(store), workers)
    raise SystemExit(len(outcome.failures) + outcome.interrupted)


def kill_group(leader: int | None) -> None:
    """Kills a builder and its workers, even before it has made a group of its own, and waits until all have ended.

    A worker that is killed in a system call, such as a slow fsync, ends after it, and keeps its locks until then.
    """
    assert leader is not None
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
    while any(runs_in(leader, process) for process in psutil.process_iter()):
        time.sleep(0.002)


def runs_in(group: int, process: psutil.Process) -> bool:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    return False


def check_store(store: Store, plan: Plan, tally: Tally) -> None:
    """What a plan calls warm verifies; so does every object that has its name; every record can be read."""
    for digest in set(plan.digests()):
        tally.wrong_but_warm += not verifies(store, digest)
    for digest in store.objects.digests():
        tally.objects_verified += 1
        tally.bad_objects += not verifies(store, digest)
    for key in store.actions:
        try:
            store.actions.records.load(key)
        except RecordError:
            tally.unreadable_records += 1


def verifies(store: Store, digest: Digest) -> bool:
    try:
        store.objects.verify(digest)
    except AotGaudiError:
        return False
    return True


def kill_real_builds(folder: Path, kills: int, rng: random.Random, tally: Tally, workers: int) -> None:
    """Kills `aotgaudi build cache` of a small model on the CPU backend at random moments of its whole run."""
    spec_path = folder / "tiny.toml"
    shutil.copy(REAL_SPEC, spec_path)
    manifest = Manifest.of(load_spec(spec_path))
    store = Store.open(folder / "real")
    command = [sys.executable, "-m", "aotgaudi", "build", "cache", str(spec_path)]
    command += ["--store", str(store.root), "-j", str(workers)]
    while tally.kills < kills:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(rng.uniform(1.0, 25.0))
            shutil.rmtree(store.root)  # It was ready: the next one begins anew.
            store = Store.open(store.root)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)
            process.wait()
            tally.kills += 1
        check_store(store, plan_manifest(manifest, store), tally)
        print(f"real: {asdict(tally)}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    plan = plan_manifest(manifest, store)
    check_store(store, plan, tally)
    tally.finished_runs += 1
    tally.units_compiled += len(plan.units)
    tally.unfinished_runs += done.returncode != 0 or not plan.is_complete
    tally.left_in_tmp += sum(1 for _ in (store.root / "tmp").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000, help="of builds with the fake backend")
    parser.add_argument(
        "--real", type=int, default=0, metavar="N", help="kills of builds with the CPU backend"
    )
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--json", type=Path, help="file for the outcome")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    began, rng = time.perf_counter(), random.Random(args.seed)
    results: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory(prefix="aotgaudi-kills-") as folder:
        if args.kills:
            results["fake"] = Tally()
            Builds(Path(folder), rng, results["fake"], workers=args.workers, units=args.units).run(args.kills)
        if args.real:
            results["real"] = Tally()
            kill_real_builds(Path(folder), args.real, rng, results["real"], args.workers)
    for name, tally in results.items():
        print(f"{name}: {asdict(tally)}")
    print(
        f"{'good' if all(t.is_good for t in results.values()) else 'BAD'}, {time.perf_counter() - began:.0f} s"
    )
    if args.json:
        args.json.write_text(
            json.dumps({n: asdict(t) for n, t in results.items()}, indent=1), encoding="utf-8"
        )
    raise SystemExit(not all(tally.is_good for tally in results.values()))


if __name__ == "__main__":
    main()
