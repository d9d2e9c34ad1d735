"""Every system call with which we write, failed once each in every way that a disk or a quota can: strace injects it.

Four operations: publish (build units of the fake backend into a store), seal (a bundle of them), push (to a directory) and
pull (into an empty store). Each is first traced, to see which of its calls write below its directory. Then it is run once
for each such call and each error, in a new process that a server forks, with that one call failing. It must end well, or
with an error of ours, in one line and with its exit code; what it wrote must verify; and the same operation must then
finish.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kills import Tally, check_store

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.compile.pipeline import fetch_missing, make_receipt, upload_all
from aotgaudi.compile.run import Watch, run_plan
from aotgaudi.errors import AotGaudiError, CompileError, RemoteError
from aotgaudi.manifest.manifest import Manifest, dumps
from aotgaudi.share.remote import Remote
from aotgaudi.share.remote_cache import RemoteCache
from aotgaudi.store.store import Store
from tests.workload import PoolInThisProcess, Workload

FORK = multiprocessing.get_context("fork")
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EACCES", "EROFS", "EMFILE")
CALLS = (
    "write,pwrite64,writev,fsync,fdatasync,rename,renameat,renameat2,openat,mkdir,mkdirat,link,linkat,unlink,unlinkat,"
    "rmdir,ftruncate,chmod,fchmod,fchmodat,copy_file_range,sendfile,utimensat"
)
_LINE = re.compile(r"^(?P<pid>\d+)\s+(?P<call>\w+)\((?P<rest>.*)$")
FAILED = 70
"""Exit code of an operation that ended by what is no error of ours: a bug."""


class Place:
    """A directory with a store that is traced, or built, as the operation needs it."""

    def __init__(self, root: Path, operation: str) -> None:
        self.root, self.operation = root, operation
        self.work = Workload((("layer a", "head b"),), root / "journal")

    def prepare(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        store = Store.open(self.root / "store")
        self.work.seed(store)
        if self.operation != "publish":
            self.publish()
        if self.operation == "pull":
            self.push()

    def run(self) -> None:
        getattr(self, self.operation)()

    def publish(self) -> None:
        store = Store.open(self.root / "store")
        with store.in_use():
            outcome = run_plan(self.work.plan(store), self.work.spec, store, PoolInThisProcess(1), Watch())
        if outcome.failures:
            raise CompileError("; ".join(f"{each.label}: {each.message}" for each in outcome.failures))

    def seal(self) -> None:
        store = Store.open(self.root / "store")
        with store.in_use():
            manifest = Manifest.of(self.work.spec)
            receipt = make_receipt(manifest, self.work.plan(store))
            pack_bundle(dumps(manifest), manifest.id, receipt, store.objects, self.root / "bundle")

    def push(self) -> None:
        store = Store.open(self.root / "store")
        warnings: list[str] = []
        with RemoteCache(self._remote(), store, push=True, warn=warnings.append) as remote:
            upload_all(self.work.plan(store), remote)
        if warnings:  # A build would go on.
            raise RemoteError(warnings[0])

    def pull(self) -> None:
        store = Store.open(self.root / "other")
        with store.in_use(), RemoteCache(self._remote(), store) as remote:
            fetch_missing(self.work.plan(store), store, remote)

    def is_done(self) -> bool:
        """Whether the operation has given all that it should."""
        if self.operation == "seal":
            return self._is_sealed()
        if self.operation == "push":
            shutil.rmtree(self.root / "other", ignore_errors=True)
            self.pull()
        name = "store" if self.operation == "publish" else "other"
        store = Store.open(self.root / name)
        return self.work.plan(store).is_complete

    def faults(self) -> list[str]:
        """What does not verify, of all that there is."""
        tally = Tally()
        for name in ("store", "other"):
            if (self.root / name / "format").exists():
                store = Store.open(self.root / name)
                check_store(store, self.work.plan(store), tally)
        bundle, found = self.root / "bundle", [] if tally.is_good else [str(tally)]
        if bundle.exists() and not self._is_sealed():
            found.append("a bundle that does not verify has its name")
        return found

    def _is_sealed(self) -> bool:
        """Whether the bundle holds the program and its units, intact. The program is of no entry of the manifest."""
        report = verify_bundle(open_bundle(self.root / "bundle"))
        return not (report.corrupt or report.extra) and report.num_objects == 1 + len(self.work.unit_keys)

    def _remote(self) -> Remote:
        return Remote(str(self.root / "remote"))


@dataclass(frozen=True)
class Call:
    """The `number`-th (from 1) `name` of the thread that made it, since the operation began."""

    name: str
    number: int
    text: str


@dataclass(frozen=True)
class Ended:
    code: int
    said: str
    traced: str


def execute(place: Place, options: tuple[str, ...] | None, *, opened_first: int = 0) -> Ended:
    """Runs the operation in a forked process; with `options`, under strace.

    `opened_first`: what the main thread opens in vain before, so that a number meant for another thread hits nothing there.
    """
    reader, writer = os.pipe()
    said = place.root.with_suffix(".said")
    process = FORK.Process(target=_child, args=(place, reader, said, opened_first))
    process.start()
    assert process.pid
    trace = place.root.with_suffix(".trace")
    with contextlib.ExitStack() as stack:
        if options is not None:
            stack.enter_context(_strace(process.pid, trace, options))
        os.write(writer, b"go")
        process.join()
    os.close(reader)
    os.close(writer)
    text = trace.read_text(encoding="utf-8", errors="replace") if options is not None else ""
    return Ended(process.exitcode or 0, said.read_text(encoding="utf-8"), text)


@contextlib.contextmanager
def _strace(pid: int, trace: Path, options: tuple[str, ...]) -> Iterator[None]:
    command = ["strace", "-f", "-y", "-s", "16", "-o", str(trace), *options, "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr
    line = tracer.stderr.readline()
    if "attached" not in line:
        raise RuntimeError(f"strace did not attach: {line}")
    yield
    tracer.communicate()


def _child(place: Place, reader: int, said: Path, opened_first: int) -> None:
    """Waits to be traced, runs the operation, and ends as the command line would."""
    os.read(reader, 2)
    for _ in range(opened_first):
        with contextlib.suppress(OSError):
            os.close(os.open(os.devnull, os.O_RDONLY))
    code, text = 0, ""
    try:
        place.run()
    except AotGaudiError as error:
        code, text = error.exit_code, f"error: {error}"
    except BaseException:
        code, text = FAILED, traceback.format_exc()
    for _ in range(3):  # Threads have counts of their own: this may be the main thread's call of that number.
        with contextlib.suppress(OSError):
            said.write_text(text, encoding="utf-8")
            break
    os._exit(code)


def write_calls(place: Place) -> list[Call]:
    """The calls of the operation that write below its directory."""
    place.prepare()
    ended = execute(place, ("-e", f"trace={CALLS}"))
    assert ended.code == 0, ended.said
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for line in ended.traced.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        counts[match["pid"], match["call"]] += 1
        is_ours = f"{place.root}/" in match["rest"]
        if is_ours and (match["call"] != "openat" or "O_CREAT" in match["rest"]):
            found.append(Call(match["call"], counts[match["pid"], match["call"]], line))
    return found


def fail_once(place: Place, call: Call, error: str) -> tuple[str, str]:
    """Returns how it went: ``clean``, ``tolerated``, ``not met``, or ``bad``, and why."""
    place.prepare()
    inject = f"inject={call.name}:error={error}:when={call.number}"
    options = ("-e", f"trace={CALLS}", "-e", inject)
    ended = execute(place, options)
    if any(f"{place.root}/" not in line for line in ended.traced.splitlines() if "(INJECTED)" in line):
        place.prepare()  # Counts are a thread's own: the main thread was hit where it reads something else.
        ended = execute(place, options, opened_first=call.number)
    if "(INJECTED)" not in ended.traced:
        return "not met", ""
    if ended.code == FAILED or "Traceback" in ended.said:
        return "bad", f"exit code {ended.code}: {ended.said}"
    if ended.code and (len(ended.said.splitlines()) != 1 or ended.code not in (2, 4, 6)):
        return "bad", f"exit code {ended.code}: {ended.said}"
    try:
        faults = place.faults()
        if faults:
            return "bad", "; ".join(faults)
        if ended.code == 0 and not place.is_done():
            return "bad", "ended well, and has not done its work"
    except AotGaudiError as problem:
        return "bad", f"afterwards: {problem}"
    again = execute(place, None)
    if again.code or not place.is_done():
        return "bad", f"the next run does not finish: {again.said}"
    return ("clean" if ended.code else "tolerated"), ended.said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operation", choices=("publish", "seal", "push", "pull"), action="append")
    parser.add_argument("--sample", type=int, help="only so many cases of each operation, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the outcome")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    began, rng = time.perf_counter(), random.Random(args.seed)
    results: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="aotgaudi-syscalls-") as folder:
        for operation in args.operation or ("publish", "seal", "push", "pull"):
            place, tally = (
                Place(Path(folder) / operation, operation),
                results.setdefault(operation, Counter()),
            )
            calls = write_calls(place)
            tally["calls"] = len(calls)
            cases = [(call, error) for call in calls for error in ERRORS]
            for call, error in rng.sample(cases, args.sample) if args.sample else cases:
                how, why = fail_once(place, call, error)
                tally[how] += 1
                if how == "bad" or args.verbose:
                    print(f"{operation}: {how}: {error} in {call.text}\n    {why}", flush=True)
            print(f"{operation}: {dict(tally)}", flush=True)
    num_bad = sum(tally["bad"] for tally in results.values())
    cases_run = sum(tally.total() - tally["calls"] for tally in results.values())
    print(f"{cases_run} cases in {time.perf_counter() - began:.0f} s, {num_bad} bad")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    sys.exit(bool(num_bad))


if __name__ == "__main__":
    main()
