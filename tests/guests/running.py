"""Runs of the supervisor, each in a process of its own, forked: with its log, its port and the guest's."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aotgaudi.errors import AotGaudiError
from aotgaudi.wrap.process_tree import ProcessTree
from aotgaudi.wrap.run import run
from aotgaudi.wrap.run_options import Listen, Policy, RunOptions
from aotgaudi.wrap.signals import ENDING
from tests.guests.fake import Fake
from tests.ports import free_port

SECONDS = 120.0
"""How long anything may take on a busy machine."""


def wait(condition: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.05)


@dataclass
class Running:
    """A supervisor that runs; `log` is what it and its guest said."""

    pid: int
    port: int
    fake: Fake
    log_path: Path
    status: int | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def get(self, path: str) -> tuple[int, str]:
        return ask(self.port, "GET", path)

    def complete(self, **body: object) -> tuple[int, str]:
        document = {"model": "m", "prompt": "x", **body}
        return ask(self.fake.port, "POST", "/v1/completions", json.dumps(document))

    def is_ready(self) -> bool:
        assert self.poll() is None, f"it ended with {self.status}:\n{self.log}"
        try:
            return self.get("/ready")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def wait_ready(self) -> None:
        wait(self.is_ready, "ready")

    def metric(self, line: str) -> float:
        text = self.get("/metrics")[1]
        return float(next(row for row in text.splitlines() if row.startswith(f"{line} ")).rpartition(" ")[2])

    def report(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self.get("/report")[1])
        return found

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.poll() is None:
            os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        try:
            wait(lambda: self.poll() is not None, "its end")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.log}") from error
        assert self.status is not None
        return self.status


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@dataclass(frozen=True)
class Runs:
    """How runs of one bundle are started."""

    bundle: Path
    folder: Path
    environ: Mapping[str, str]
    options: RunOptions = field(default_factory=lambda: RunOptions(bundle=Path(), environ={}))

    @contextmanager
    def started(self, fake: Fake, *, cwd: Path | None = None, **options: Any) -> Iterator[Running]:
        """A run; what is left of it is killed at the end."""
        port, log_path = free_port(), self.folder / f"log-{time.monotonic_ns()}"
        policy = Policy(
            require_warm=options.pop("require_warm", True),
            on_compile=options.pop("on_compile", "report"),
            start_seconds=options.pop("start_seconds", SECONDS),
            termination_seconds=options.pop("termination_seconds", 10.0),
        )
        environ = {**self.environ, "FAKE_FAULTS": ",".join(fake.faults), **options.pop("environ", {})}
        chosen = replace(
            RunOptions(bundle=self.bundle, environ=environ, words=fake.words, policy=policy),
            listen=Listen("127.0.0.1", port),
            began=time.monotonic(),
            **options,
        )
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, ENDING
        )  # So that the child gets every signal as `_run` says.
        pid = os.fork()
        if pid == 0:
            _run(chosen, log_path, cwd)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        running = Running(pid, port, fake, log_path)
        try:
            yield running
        finally:
            if running.poll() is None:
                os.kill(pid, signal.SIGKILL)
                running.wait()

    def refusal(self, fake: Fake, **options: Any) -> tuple[int, str]:
        """The exit code and the sentence of a run that is refused, before or after the guest was started."""
        with self.started(fake, **options) as running:
            status = running.wait()
            (sentence,) = [line for line in running.log.splitlines() if line.startswith("error: ")]
            return status, sentence


def left_in(*places: Path) -> frozenset[int]:
    """Processes of guests that ran in these places."""
    return frozenset().union(*(ProcessTree(None, f"AOTGAUDI_PLACE={place}").living() for place in places))


def _run(options: RunOptions, log_path: Path, cwd: Path | None) -> None:
    """In the forked process: what the command line does, and no return."""
    status = 1
    for number in ENDING:  # Whatever the process of the tests does with them.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setsid()
        if cwd is not None:
            os.chdir(cwd)
        for handler in logging.root.handlers[:]:
            logging.root.removeHandler(handler)
        stream = os.fdopen(os.dup(2), "w", buffering=1)
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=stream)
        status = run(options)
    except AotGaudiError as error:
        os.write(2, f"error: {error}\n".encode())
        status = error.exit_code
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException as error:
        os.write(2, f"error: a bug: {error!r}\n".encode())
    finally:
        os._exit(status)
