"""Runs each probe of an examination in a process of its own: the bridge reads its environment once, and may abort.

A probe that takes too long is killed with all that it started, and that is an outcome like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

from aotgaudi.child import python_command
from aotgaudi.gaudi.environment import process_environment

PROBE_SECONDS = 120.0
PATIENCE_SECONDS = 30.0
"""How long a card may stay busy after the process that had it was killed."""
BUSY, ABSENT = "acquire failed", "No devices found"
"""What the bridge says of a card that another process has (K-25), and, besides, where it sees none."""
_OUTPUT, _RESULT = "output", "result.json"
_POLL_SECONDS, _RETRY_SECONDS = 0.02, 1.0

T = TypeVar("T")


class ProbeProcess(Protocol):
    """A process that runs a probe, in a session of its own."""

    def poll(self) -> int | None:
        """Returns what it ended with, negative for a signal; None while it runs."""
        ...

    def kill(self) -> None:
        """Ends it, with all that it started."""
        ...


StartProbe = Callable[[Sequence[str], Mapping[str, str], Path], ProbeProcess]
"""Starts `aotgaudi.doctor.hpu.probes.run` with arguments and an environment; what it prints goes to a file."""


class ProbeFailedError(Exception):
    """A probe came to no end of its own; the message is why. Never leaves doctor."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a probe.

    Attributes:
        values: What it saw; empty if it came to no end of its own.
        problem: Why it did not: an exception in one line, a signal, or the time; empty if it did.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the probe came to its end."""
        return not self.problem

    @property
    def is_busy(self) -> bool:
        """Whether another process has the card."""
        return BUSY in self.problem and ABSENT not in self.problem

    def required(self) -> Mapping[str, Any]:
        """Returns what the probe saw. Raises ProbeFailedError if it came to no end of its own."""
        if not self.is_whole:
            raise ProbeFailedError(self.problem)
        return self.values


class Lab:
    """Runs probes, one at a time, each with a directory of recipes."""

    def __init__(
        self,
        directory: Path,
        *,
        environment: Mapping[str, str],
        module_id: int | None = None,
        seconds: float = PROBE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        start: StartProbe | None = None,
    ) -> None:
        """Works in `directory`, on the card `module_id` (None: any); a probe has `seconds`."""
        self.directory = directory
        self._inherited, self._module_id = dict(environment), module_id
        self._seconds, self._patience_seconds = seconds, patience_seconds
        self._start = start or start_process
        self.card = "a card" if module_id is None else f"the card with module id {module_id}"
        self._kept: dict[str, Any] = {}

    def new_directory(self, name: str) -> Path:
        """Returns a new, empty directory."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.directory))

    def inherited(self, name: str) -> str:
        """Returns a variable of the environment that doctor was started in; empty where it is not set."""
        return self._inherited.get(name, "")

    def kept(self, name: str, make: Callable[[], T]) -> T:
        """Returns what `make` gave the first time that it was asked for by this name."""
        if name not in self._kept:
            self._kept[name] = make()
        return cast("T", self._kept[name])

    def run(
        self,
        probe: str,
        recipes: Path | None = None,
        *,
        environment: Mapping[str, str | None] | None = None,
        **arguments: Any,
    ) -> Outcome:
        """Runs ``MODULE.FUNCTION`` of `aotgaudi.doctor.hpu.probes` with `arguments`.

        Again and again while the card is busy and there is patience left: the one that had it before may just have ended.

        Args:
            probe: Its name.
            recipes: The bridge's directory; None: a new one.
            environment: What differs from the environment of a build; None: not set.
            arguments: Of the probe; plain values.
        """
        deadline = time.monotonic() + self._patience_seconds
        while True:
            outcome = self.run_once(probe, recipes, environment or {}, arguments)
            if not outcome.is_busy or time.monotonic() + _RETRY_SECONDS >= deadline:
                return outcome
            time.sleep(_RETRY_SECONDS)

    def run_once(
        self,
        probe: str,
        recipes: Path | None = None,
        changes: Mapping[str, str | None] = MappingProxyType({}),
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Outcome:
        """Runs a probe as `run` does, and takes a busy card for an answer."""
        directory = self.new_directory("probe")
        with self._started(probe, recipes, directory, changes, arguments) as process:
            problem = _wait(process, self._seconds)
        try:
            document = json.loads((directory / _RESULT).read_bytes())
            return Outcome(document["values"], document["problem"] or problem)
        except (OSError, ValueError, KeyError, TypeError):
            return Outcome({}, problem or "it ended without a result")

    @contextlib.contextmanager
    def running(self, probe: str, **arguments: Any) -> Iterator[ProbeProcess]:
        """Has a probe run meanwhile, and kills it at the end."""
        with self._started(probe, None, self.new_directory("probe"), {}, arguments) as process:
            yield process

    @contextlib.contextmanager
    def _started(
        self,
        probe: str,
        recipes: Path | None,
        directory: Path,
        changes: Mapping[str, str | None],
        arguments: Mapping[str, Any],
    ) -> Iterator[ProbeProcess]:
        variables: dict[str, str | None] = {
            **process_environment(self._inherited, recipes or self.new_directory("recipes"), self._module_id),
            **changes,
        }
        environment = {name: value for name, value in variables.items() if value is not None}
        command = [probe, json.dumps(dict(arguments)), str(directory / _RESULT)]
        process = self._start(command, environment, directory / _OUTPUT)
        try:
            yield process
        finally:
            process.kill()


class _Subprocess:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # Nothing is left of it.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_process(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> ProbeProcess:
    """Starts a probe in a new interpreter."""
    with output.open("wb") as file:
        return _Subprocess(
            subprocess.Popen(
                python_command("aotgaudi.doctor.hpu.probes.run", *arguments),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )


def _wait(process: ProbeProcess, seconds: float) -> str:
    """Returns what was wrong with the process's end; empty if nothing was."""
    deadline = time.monotonic() + seconds
    while (code := process.poll()) is None:
        if time.monotonic() > deadline:
            return f"it took more than {seconds:g} s"
        time.sleep(_POLL_SECONDS)
    if code >= 0:
        return f"it ended with exit status {code}" if code else ""
    return f"it ended with {signal.Signals(-code).name}"
