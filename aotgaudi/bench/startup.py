"""Measures how long ``aotgaudi serve`` takes to become ready, in n starts, each compared with the floor.

The time runs from the start of the process to the first 200 of ``/ready``. The floor is a process that does what any server
of the same bundle and model must do (`aotgaudi.bench.floor`). Starts and floors alternate, after one uncounted pair that
fills the page cache. The phases are those that each server reports in ``/metrics``.
"""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from prometheus_client.parser import text_string_to_metric_families

from aotgaudi.child import python_command
from aotgaudi.errors import AotGaudiError
from aotgaudi.phases import Phase

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.005
_READY_SECONDS = 600.0
_STOP_SECONDS = 60.0
_BEGIN, _END = "aotgaudi_start_phase_begin_seconds", "aotgaudi_start_phase_end_seconds"


class StartFailedError(AotGaudiError):
    """A measured process ended or did not answer. The exit code is that of the process, if there is one."""

    def __init__(self, what: str, exit_code: int | None, output: str) -> None:
        last = output.strip().splitlines()[-1:] or ["it printed nothing"]
        how = "is not ready in time" if exit_code is None else f"ended with {exit_code}"
        super().__init__(f"{what} {how}: {last[0].removeprefix('error: ')}")
        self.exit_code = exit_code if exit_code is not None and exit_code > 0 else 1


@dataclass(frozen=True)
class Subject:
    """What to start: a bundle, a model, further options of `serve`, and the processes' environment."""

    bundle: Path
    model: Path
    environment: Mapping[str, str]
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Spread:
    """Samples of one figure, at least one."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle sample."""
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
class Start:
    """One start: the seconds to ready, measured from outside, and the phases that the server reports."""

    ready_seconds: float
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Startup:
    """The measurement, with one sample per run."""

    floor: Spread
    starts: tuple[Start, ...]

    @property
    def ready(self) -> Spread:
        """Seconds to ready."""
        return Spread(tuple(start.ready_seconds for start in self.starts))

    @property
    def phases(self) -> dict[str, tuple[Spread, Spread, Spread]]:
        """Begin, end and length of each phase that all starts have, ordered by median begin."""
        by_name = [{phase.name: phase for phase in start.phases} for start in self.starts]
        names = set(by_name[0]).intersection(*by_name)
        spreads = {}
        for name in names:
            of_name = [phases[name] for phases in by_name]
            rows = zip(*((phase.begin, phase.end, phase.seconds) for phase in of_name), strict=True)
            begin, end, seconds = map(Spread, rows)
            spreads[name] = (begin, end, seconds)
        return dict(sorted(spreads.items(), key=lambda item: (item[1][0].median, item[1][1].median)))


def measure(subject: Subject, num_runs: int, on_run: Callable[[int], None] = lambda _: None) -> Startup:
    """Starts floor and server in turn, `num_runs` times and once uncounted. Calls `on_run` with the number of runs done.

    Raises:
        StartFailedError: a process ended, or did not become ready.
    """
    run_start(subject)  # First, because it reports what is wrong with a bundle or a model.
    run_floor(subject)
    floors, starts = [], []
    for number in range(num_runs):
        on_run(number)
        floors.append(run_floor(subject))
        starts.append(run_start(subject))
    on_run(num_runs)
    return Startup(Spread(tuple(floors)), tuple(starts))


def run_floor(subject: Subject) -> float:
    """Returns the seconds from the start of the floor's process to its printed line."""
    command = python_command("aotgaudi.bench.floor", str(subject.bundle), str(subject.model))
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            env=subject.environment,
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - started
        if not line or process.returncode:
            raise StartFailedError("the floor", process.returncode, _text(log))
    return seconds


def run_start(subject: Subject) -> Start:
    """Starts a server with ``--require-warm`` on the loopback address, stops it once it is ready, and returns its times."""
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        with _serving(subject, port, log) as process:
            while _ask(port, "/ready") is None:
                has_ended = process.poll() is not None
                if has_ended or time.perf_counter() - started > _READY_SECONDS:
                    raise StartFailedError("the server", process.returncode, _text(log))
                time.sleep(_POLL_SECONDS)  # How often to ask, not a guess at how long a start takes.
            seconds = time.perf_counter() - started
            return Start(seconds, phases_in(_ask(port, "/metrics") or ""))


def phases_in(metrics: str) -> tuple[Phase, ...]:
    """Returns the phases of a start from a server's metrics; empty if the server is too old to report any."""
    edges: dict[str, dict[str, float]] = {_BEGIN: {}, _END: {}}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in edges:
                edges[sample.name][sample.labels["phase"]] = sample.value
    begin, end = edges[_BEGIN], edges[_END]
    return tuple(Phase(name, begin[name], end[name]) for name in begin if name in end)


@contextmanager
def _serving(subject: Subject, port: int, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    where = ["--bundle", str(subject.bundle), "--model", str(subject.model), "--require-warm"]
    listening = ["--host", _HOST, "--port", str(port), "--drain-delay", "0"]
    command = python_command("aotgaudi.cli.main", "serve", *subject.options, *where, *listening)
    process = subprocess.Popen(command, stdout=log, stderr=log, env=subject.environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(port: int, path: str) -> str | None:
    """Returns the body of a 200, or None."""
    connection = http.client.HTTPConnection(_HOST, port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if answer.status == 200 else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _text(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")
