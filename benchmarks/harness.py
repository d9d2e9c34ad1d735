"""What the benchmarks share: samples, tables, the machine's description, processes and servers.

A benchmark is a script. It prints tables and writes one JSON file with all samples, which git ignores; docs/benchmarks.md
quotes the tables. Paths stay out of that file: of an argument that is a path, only the name is kept.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import aotgaudi

SCHEMA = "aotgaudi.benchmark/1"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
POLL_SECONDS = 0.005
READY_TIMEOUT_SECONDS = 120.0
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MALLOC_ARENA_MAX",
)


@dataclass(frozen=True)
class Spread:
    """Samples of one figure, at least one."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """Returns ``median (min to max)``, each times `scale`."""
        low, high = min(self.samples) * scale, max(self.samples) * scale
        return f"{self.median * scale:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    def json(self) -> dict[str, Any]:
        """Returns the figures and all samples as a JSON value."""
        return {
            "n": len(self.samples),
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "samples": list(self.samples),
        }


@dataclass(frozen=True)
class Table:
    """A table of text; `note` says under what conditions it was measured."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
                 for row in (self.columns, tuple("-" * w for w in widths), *self.rows)]  # fmt: skip
        return "\n".join([f"\n{self.title}", *lines, *([self.note] if self.note else [])])


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least `fraction` of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -int(-fraction * len(ordered) // 1)
    return ordered[max(rank, 1) - 1]


def verdict(value: float, target: float, *, at_least: bool = False) -> str:
    """``met`` or ``missed``, with the target."""
    met = value >= target if at_least else value <= target
    return f"{'met' if met else 'missed'} ({'>=' if at_least else '<='} {target:g})"


def on_engine_thread(work: Callable[[], None]) -> None:
    """Runs `work` as the server's engine runs: on a second thread, after the main one has computed in parallel.

    The OpenMP runtime counts the threads of all pools. Once they outnumber the cores it lets a thread that waits
    sleep soon, rather than spin; what runs on the main thread of a fresh process would not be comparable.
    """
    import torch

    torch.ones(1 << 22).add_(1)
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=guarded, name="engine")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


# Arguments, environment, result


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tag", default="", help="tells results of one benchmark apart, e.g. the model's name"
    )
    parser.add_argument("--date", default="", help="written into the result [default: today]")
    parser.add_argument(
        "--output", type=Path, help="the JSON file [default: benchmarks/results/NAME[-TAG].json]"
    )
    return parser


def environment(threads: object = None) -> dict[str, Any]:
    """The machine, the versions and the thread settings."""
    versions = {name: _version(name) for name in ("torch", "transformers")}
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": f"{platform.system()} {platform.release()} ({_distribution()}, {'-'.join(platform.libc_ver())})",
        "python": platform.python_version(),
        **versions,
        "aotgaudi": aotgaudi.__version__,
        "threads": threads,
        "variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "load_average_at_start": os.getloadavg()[0],
    }


def finish(
    name: str,
    args: argparse.Namespace,
    machine: Mapping[str, Any],
    measurements: Mapping[str, Any],
    tables: Sequence[Table],
) -> None:
    """Prints the tables and writes the result."""
    for table in tables:
        print(table.text())
    result = {
        "schema": SCHEMA,
        "name": name,
        "tag": args.tag,
        "date": args.date or datetime.date.today().isoformat(),
        "environment": dict(machine),
        "arguments": {
            key: _without_folders(value) for key, value in vars(args).items() if key not in ("output", "date")
        },
        "measurements": dict(measurements),
        "tables": [asdict(table) for table in tables],
    }
    path = args.output or RESULTS / f"{name}{f'-{args.tag}' if args.tag else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")


def _without_folders(value: object) -> object:
    if isinstance(value, Path):
        return value.name
    return [_without_folders(item) for item in value] if isinstance(value, (list, tuple)) else value


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


# Processes


def process_environment(threads: int | None = None) -> dict[str, str]:
    """The environment of a measured process: this one's, offline, with as many OpenMP threads."""
    pinned = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**os.environ, "HF_HUB_OFFLINE": "1", **pinned}


def command(*arguments: str | Path) -> list[str]:
    """The command line of aotgaudi, as a process of this interpreter."""
    return [sys.executable, "-m", "aotgaudi", *map(str, arguments)]


def run(arguments: Sequence[str], timeout: float = 7200, threads: int | None = None) -> tuple[float, str]:
    """Runs a process to its end. Returns its wall seconds and standard output; exits where it fails."""
    started = time.perf_counter()
    done = subprocess.run(
        arguments,
        check=False,
        env=process_environment(threads),
        cwd=ROOT,
        timeout=timeout,
        text=True,
        capture_output=True,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return seconds, done.stdout


def wait_until(check: Callable[[], bool], what: str, timeout: float = READY_TIMEOUT_SECONDS) -> float:
    """Polls until `check` holds. Returns the time (perf_counter) when it did; exits at the deadline."""
    deadline = time.perf_counter() + timeout
    while time.perf_counter() < deadline:
        if check():
            return time.perf_counter()
        time.sleep(POLL_SECONDS)  # The pause of the poll, not a guess of how long something takes.
    sys.exit(f"{what}: not within {timeout:.0f} s")


@dataclass(frozen=True)
class Server:
    """A server that was ready `ready_seconds` after its process was started."""

    pid: int
    port: int
    ready_seconds: float

    def get(self, path: str) -> str:
        """Returns the body of a GET; raises RuntimeError unless it is a 200."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the JSON that a POST of JSON answers; raises RuntimeError unless it is a 200."""
        answer: dict[str, Any] = json.loads(self._ask("POST", path, json.dumps(body)))
        return answer

    def metric(self, name: str) -> float:
        """Returns the sum of a metric's samples. Raises LookupError where it has none."""
        lines = self.get("/metrics").splitlines()
        samples = [float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        if not samples:
            raise LookupError(f"no metric {name}")
        return sum(samples)

    def _ask(self, method: str, path: str, body: str | None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {text[:300]}")
        return text


@contextmanager
def serving(bundle: Path, model: Path, threads: int, *, name: str = "model") -> Iterator[Server]:
    """Starts ``aotgaudi serve --require-warm`` on the loopback address and waits for /ready."""
    port = free_port()
    arguments = command("serve", "--bundle", bundle.resolve(), "--model", model.resolve())
    arguments += [
        "--require-warm",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        name,
        "--drain-delay",
        "0",
    ]
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            arguments, stdout=log, stderr=log, cwd=ROOT, env=process_environment(threads)
        )
        try:

            def is_ready() -> bool:
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"the server ended with {process.returncode}:\n{log.read().decode()[-4000:]}")
                return _answers_ready(port)

            ready = wait_until(is_ready, "the server's /ready")
            yield Server(process.pid, port, ready - started)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """Returns a port of the loopback address that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
