"""A server under attack, and what must be true of every server that was attacked."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from tests.e2e.harness import Server, eventually
from tests.hostile.witnesses import Figures, Watch, watching

SETTLE_SECONDS, QUIET_SECONDS, GLANCE_SECONDS = 1.5, 3.0, 1.0
"""What the witnesses need to make their clients is no part of the quiet figures. Where no times are judged, a glance at the
server's memory is enough, and the clients may be new."""
MAX_SLOWER = 2.0
NOISE_SECONDS = 0.05
"""A shared machine's own hiccups, which are no part of a ratio of two small numbers."""
MAX_HEALTH_SECONDS = 0.1
MAX_GROWTH_BYTES = 150 * 10**6
MAX_STOP_SECONDS = 40.0  # docs/how-to/serve.md, "Stopping", without a delay.
MAX_LOG_BYTES = 256 * 1024
MUST_BE_ZERO = ("aotgaudi_compilations_total", "aotgaudi_failed_steps_total")


Attack = Callable[..., None]
"""What runs against a port, its first argument. It is importable, as it runs in a process of its own."""


@dataclass
class Ordeal:
    """One attack on one server: what to measure, and what was found."""

    name: str
    server: Server
    watch: Watch
    quiet: Figures
    judges_times: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    attacked: Figures = field(default_factory=Figures)
    stop_seconds: float = 0.0
    is_serving: bool = True
    base_url: str = ""
    """Where clients connect: the server, or the proxy in front of it."""

    def expect(self, condition: bool, problem: str) -> None:
        """Notes a problem unless `condition`."""
        if not condition:
            self.problems.append(problem)

    def _expect_time(self, condition: bool, problem: str) -> None:
        """The same where times are judged, which takes a machine of one's own; elsewhere it is a note."""
        if self.judges_times:
            self.expect(condition, problem)
        elif not condition:
            self.notes.append(problem)

    @contextmanager
    def attacking(self, attack: Attack, *arguments: Any, times: int = 1) -> Iterator[list[BaseProcess]]:
        """Runs `attack` in `times` processes, which give way to the server's as other machines would; ends them."""
        port = int(self.base_url.rpartition(":")[2])
        context = multiprocessing.get_context("spawn")
        processes: list[BaseProcess] = [
            context.Process(target=_run, args=(attack, port, *arguments), daemon=True) for _ in range(times)
        ]
        for process in processes:
            process.start()
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()

    def attack(self, attack: Attack, *arguments: Any, times: int = 1, seconds: float = 60.0) -> None:
        """The same, to its end, which must come within `seconds`. An attack that raises has found a problem."""
        with self.attacking(attack, *arguments, times=times) as processes:
            deadline = time.monotonic() + seconds
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
                self.expect(process.exitcode is not None, f"the attack went on for {seconds:g} s")
                self.expect(not process.exitcode, "the attack found what it should not")

    def judge(self) -> None:
        """Compares what the witnesses saw under attack with what they saw before it."""
        quiet, now = self.quiet, self.attacked
        noise = NOISE_SECONDS + 2 * max(
            quiet.late_p99, now.late_p99
        )  # A client and a server may each wake late.
        limit = MAX_SLOWER * quiet.first_token_p99 + noise
        is_slow = bool(now.first_token) and now.first_token_p99 > limit
        self._expect_time(not is_slow, f"first tokens more than {limit:.3f} s late")
        limit = max(MAX_HEALTH_SECONDS + noise, MAX_SLOWER * quiet.health_p99 + noise)
        self._expect_time(not now.health or now.health_p99 <= limit, f"/health more than {limit:.3f} s late")
        growth = now.peak_bytes - quiet.peak_bytes
        self.expect(growth <= MAX_GROWTH_BYTES, f"memory grew by {growth / 1e6:.0f} MB")
        self.problems += now.wrong[:3]

    def come_to_rest(self) -> None:
        """Asserts that nothing was compiled and that every block is back."""
        for name in MUST_BE_ZERO:
            self.expect((value := self.server.metric(name)) == 0, f"{name} is {value:g}")
        self.expect(eventually(self.server.is_idle, 10), "requests or blocks are left 10 s later")

    def stop(self) -> None:
        """Stops the server as its contract says, and reads what it has printed."""
        self.is_serving = False
        begun = time.monotonic()
        exit_code = self.server.stop()
        self.stop_seconds = time.monotonic() - begun
        self.expect(exit_code == 0, f"exit code {exit_code}")
        self.expect(self.stop_seconds <= MAX_STOP_SECONDS, f"SIGTERM took {self.stop_seconds:.0f} s")
        self.read_log()

    def read_log(self) -> None:
        """Asserts that the log is short and without tracebacks."""
        log = self.server.log
        self.expect("Traceback" not in log, f"a traceback: {log[log.find('Traceback') :][:1500]}")
        self.expect(len(log) <= MAX_LOG_BYTES, f"{len(log)} bytes of log")

    @property
    def row(self) -> str:
        """One row of the report."""
        quiet, now = self.quiet, self.attacked
        return (
            f"{self.name}: first token p99 {now.first_token_p99 * 1e3:.0f} ms "
            f"(quiet {quiet.first_token_p99 * 1e3:.0f}), "
            f"/health p99 {now.health_p99 * 1e3:.0f} ms "
            f"(quiet {quiet.health_p99 * 1e3:.0f}), late {now.late_p99 * 1e3:.0f} ms, "
            f"{(now.peak_bytes - quiet.peak_bytes) / 1e6:+.0f} MB, "
            f"{now.num_refused} refused of {len(now.first_token)}, stop {self.stop_seconds:.1f} s"
            + "".join(f"; {note}" for note in self.notes)
            + "".join(f"; NOT: {problem[:200]}" for problem in self.problems)
        )


def _run(attack: Attack, port: int, *arguments: Any) -> None:
    os.nice(19)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack(port, *arguments)


@contextmanager
def ordeal(
    name: str,
    server: Server,
    record: Callable[[str], None],
    *,
    judges_times: bool,
    proxy: Callable[[str], AbstractContextManager[str]] = nullcontext,
) -> Iterator[Ordeal]:
    """Enters `server`, takes the quiet figures, lets the body attack, and asserts what must be true afterwards.

    `proxy` puts something in front of the server, and yields where clients connect. The server is asked to stop unless the
    body has done so. A row is recorded also where something was wrong.
    """
    with server:
        with proxy(server.base_url) as base_url, watching(base_url, server.process.pid) as watch:
            if judges_times:
                time.sleep(SETTLE_SECONDS)
            watch.cut()
            time.sleep(QUIET_SECONDS if judges_times else GLANCE_SECONDS)
            it = Ordeal(name, server, watch, watch.cut(), judges_times, base_url=base_url)
            yield it
            it.attacked.add(watch.cut() if it.is_serving else Figures())
        it.judge()
        if it.is_serving:
            it.come_to_rest()
            it.stop()
    record(it.row)
    assert not it.problems, "\n".join(it.problems)
