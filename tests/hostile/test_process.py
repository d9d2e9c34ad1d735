"""Signals, limits of the system, and a log that nobody reads."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Workplace, eventually
from tests.hostile import attackers
from tests.hostile.attackers import CHAT
from tests.hostile.conftest import Trial
from tests.hostile.test_bodies import MESSAGES
from tests.hostile.test_connections import LONG


@pytest.mark.parametrize(
    "numbers",
    [
        ["TERM"],
        pytest.param(["INT"], marks=pytest.mark.nightly),
        pytest.param(["TERM", "TERM"], marks=pytest.mark.nightly),
        ["INT", "INT"],
    ],
    ids="-".join,
)
def test_h1_a_signal_under_load_ends_the_server_within_its_contract(trial: Trial, numbers: list[str]) -> None:
    with trial() as it, it.attacking(attackers.vanish, 200, LONG, 60.0):
        time.sleep(4)
        it.attacked.add(it.watch.cut())
        for name in numbers:
            it.server.process.send_signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.3)
        it.stop()


def test_a_server_that_was_held_and_let_go_four_times_under_load_goes_on(trial: Trial) -> None:
    with trial() as it, it.attacking(attackers.vanish, 50, LONG, 8.0):
        for _ in range(4):
            it.server.process.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            it.server.process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        it.watch.cut()  # What was held is not the server's fault.
        time.sleep(4)


@contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """A control group of our own. Skips the test where there is none to be had."""
    root = Path("/sys/fs/cgroup")
    parent = root if (root / "cgroup.controllers").exists() else root / controller
    group = parent / f"aotgaudi-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if not any(group.glob(f"{controller}.*")):
            pytest.skip(f"the controller {controller} is not delegated to {group}")
        yield group
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text().split(), 10)
        group.rmdir()


def test_l3_a_server_without_a_spare_thread_stops_in_order(trial: Trial) -> None:
    with control_group("pids") as group, trial() as it:
        (group / "cgroup.procs").write_text(str(it.server.process.pid))
        for child in psutil.Process(it.server.process.pid).children():
            (group / "cgroup.procs").write_text(str(child.pid))
        (group / "pids.max").write_text((group / "pids.current").read_text())
        with it.attacking(attackers.vanish, 20, LONG, 60.0):
            time.sleep(3)
            it.attacked.add(it.watch.cut())
            it.stop()


def test_h4_large_bodies_in_a_memory_limit(trial: Trial) -> None:
    with control_group("memory") as group, trial() as it:
        server = psutil.Process(it.server.process.pid)
        for process in (server, *server.children(recursive=True)):
            (group / "cgroup.procs").write_text(str(process.pid))
        is_v2 = (group / "memory.max").exists()
        limit = group / ("memory.max" if is_v2 else "memory.limit_in_bytes")
        limit.write_text(str(180 * 10**6))  # Above what it has mapped already, which is not charged again.
        it.attack(attackers.repeat, CHAT, MESSAGES, 5.0, (400, 413, 429, 503), times=4)
        it.expect(server.is_running() and server.status() != "zombie", "the server was killed")


class Pipe:
    """A pipe of 4 KiB for a server's stderr, copied to its log only while `is_read`."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(self.reading, False)
        self.is_read = True

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command that runs a server which writes here."""
        return ("sh", "-c", f'exec "$@" 2>/proc/{os.getpid()}/fd/{self.writing}', "sh")

    def pump(self, log: Path) -> None:
        """Copies until the process ends; a thread's work."""
        while True:
            time.sleep(0.02)
            with suppress(BlockingIOError, FileNotFoundError):
                if self.is_read and (data := os.read(self.reading, 4096)):
                    with log.open("ab") as file:
                        file.write(data)


def test_m8_a_log_that_nobody_reads(trial: Trial, workplace: Workplace) -> None:
    pipe = Pipe()
    server = workplace.serve(prefix=pipe.prefix)
    threading.Thread(target=pipe.pump, args=(server.log_path,), daemon=True).start()
    with trial(server=server) as it:
        pipe.is_read = False
        it.attack(attackers.say_often, b"\x16\x03\x01 nonsense\r\n\r\n", 400)
        time.sleep(2)
        it.attacked.add(it.watch.cut())
        it.server.process.send_signal(signal.SIGTERM)
        it.stop()
        pipe.is_read = True
        time.sleep(0.5)
        it.read_log()
