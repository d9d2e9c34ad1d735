"""Runs probes, each in a process of its own: a check confirms or refutes lines of the contract by what they observed.

A probe needs its own process because the bridge reads its environment once, and may abort. A probe that takes too long is
killed with everything that it started, which is an outcome like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from aotgaudi.doctor.hpu.bridge import probe_command
from aotgaudi.gaudi.environment import ABSENT, BUSY, process_environment

PROBE_SECONDS = 120.0
PATIENCE_SECONDS = 30.0
"""How long a card may stay busy after its process was killed."""
_RETRY_SECONDS = 1.0

Verdict = Literal["confirmed", "refuted", "unclear", "skipped"]
T = TypeVar("T")


class ProbeProcess(Protocol):
    """A process, the leader of its group. `wait` returns its exit code, or raises ``subprocess.TimeoutExpired``."""

    @property
    def pid(self) -> int:
        """Its id, and its group's."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, negative for a signal."""
        ...


StartProbe = Callable[[Sequence[str], Mapping[str, str]], ProbeProcess]
"""Starts `aotgaudi.doctor.hpu.bridge` with arguments and an environment."""


class ProbeFailedError(Exception):
    """A probe did not finish. The message says why. Never leaves doctor."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a probe.

    Attributes:
        values: What it observed, as far as it came.
        problem: Why it did not finish: an exception in one line, a signal, or a timeout; empty if it finished.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the probe finished."""
        return not self.problem

    @property
    def is_busy(self) -> bool:
        """Whether another process has the card."""
        return BUSY in self.problem and ABSENT not in self.problem

    def required(self) -> Mapping[str, Any]:
        """Returns what the probe observed. Raises ProbeFailedError if it did not finish."""
        if not self.is_whole:
            raise ProbeFailedError(self.problem)
        return self.values


def start_process(arguments: Sequence[str], environment: Mapping[str, str]) -> ProbeProcess:
    """Starts a probe in a new interpreter."""
    return subprocess.Popen(
        probe_command(*arguments),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


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
        start: StartProbe = start_process,
    ) -> None:
        """Works in `directory`, on the card `module_id` (None: any). A probe may take `seconds`."""
        self.directory = directory
        self._inherited, self._module_id = dict(environment), module_id
        self._seconds, self._patience_seconds = seconds, patience_seconds
        self._start = start
        self.card = "a card" if module_id is None else f"the card with module id {module_id}"
        self._kept: dict[str, Any] = {}

    def new_directory(self, name: str) -> Path:
        """Returns a new, empty directory."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.directory))

    def inherited(self, name: str) -> str:
        """Returns a variable of doctor's own environment; empty if it is not set."""
        return self._inherited.get(name, "")

    def kept(self, name: str, make: Callable[[], T]) -> T:
        """Returns the result of `make`, which is called only once for each name."""
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
        """Runs the probe ``MODULE.NAME``, a function of a module of this package, with `arguments`.

        If the card is busy, it tries again for a while, because the previous process may just have ended.

        Args:
            probe: Its name.
            recipes: The bridge's directory; None: a new one.
            environment: Differences from the environment of a build; None: not set.
            arguments: The probe's arguments, plain values.
        """
        variables: dict[str, str | None] = {
            **process_environment(self._inherited, recipes or self.new_directory("recipes"), self._module_id),
            **(environment or {}),
        }
        whole = {name: value for name, value in variables.items() if value is not None}
        deadline = time.monotonic() + self._patience_seconds
        while True:
            outcome = self._outcome([probe, json.dumps(arguments)], whole)
            if not outcome.is_busy or time.monotonic() + _RETRY_SECONDS >= deadline:
                return outcome
            time.sleep(_RETRY_SECONDS)

    def _outcome(self, words: list[str], environment: Mapping[str, str]) -> Outcome:
        result = self.new_directory("probe") / "result.json"
        process = self._start([*words, str(result)], environment)
        try:
            problem = _problem(process.wait(self._seconds))
        except subprocess.TimeoutExpired:
            problem = f"it took more than {self._seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # Nothing is left of it.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        try:
            document = json.loads(result.read_bytes())
            return Outcome(document["values"], document["problem"] or problem)
        except (OSError, ValueError, KeyError, TypeError):
            return Outcome({}, problem or "it ended without a result")


def _problem(code: int) -> str:
    """Returns why a process did not end well; empty if it did."""
    if code >= 0:
        return f"it ended with exit status {code}" if code else ""
    return f"it ended with {signal.Signals(-code).name}"


@dataclass(frozen=True, slots=True)
class LineFinding:
    """The verdict on one line of the contract, and the observation in a few words."""

    line: str
    verdict: Verdict
    observation: str


@dataclass(frozen=True, slots=True)
class HpuCheck:
    """One check.

    Attributes:
        id: H-nn.
        title: What is examined.
        lines: The lines of the contract that it examines.
        look: Runs probes and yields one finding a line. A line whose probe did not finish (`Outcome.required`) is unclear.
        needs: Lines that this check relies on; None: all that were examined before. If one was refuted, the check is
            skipped, so that each fault is reported once, at its cause.
    """

    id: str
    title: str
    lines: tuple[str, ...]
    look: Callable[[Lab], Iterable[LineFinding]]
    needs: tuple[str, ...] | None = ()

    def findings(self, lab: Lab, verdicts: Mapping[str, Verdict]) -> tuple[LineFinding, ...]:
        """Returns a finding for each line, in order, given the verdicts so far."""
        needs = verdicts if self.needs is None else self.needs
        refuted = next((line for line in needs if verdicts.get(line) == "refuted"), None)
        if refuted is not None:
            return tuple(skipped(self.lines, f"{refuted} was refuted"))
        found: dict[str, LineFinding] = {}
        problem = "not looked at"
        try:
            for finding in self.look(lab):
                found[finding.line] = finding
        except ProbeFailedError as error:
            problem = str(error)
        return tuple(found.get(line) or LineFinding(line, "unclear", problem) for line in self.lines)


F = TypeVar("F", bound=Callable[..., Iterable[LineFinding]])


def check(
    checks: list[HpuCheck], number: str, title: str, *lines: str, needs: tuple[str, ...] | None = ()
) -> Callable[[F], F]:
    """Adds a check to `checks`: the decorated function has a `Lab` run probes, and judges what they observed."""

    def add(look: F) -> F:
        checks.append(HpuCheck(number, title, lines, look, needs))
        return look

    return add


def probe(
    checks: list[HpuCheck],
    number: str,
    title: str,
    *lines: str,
    needs: tuple[str, ...] = (),
    environment: Mapping[str, str | None] | None = None,
) -> Callable[[F], F]:
    """Adds a check to `checks`: the decorated function is its only probe, runs with a `Bridge`, and judges itself."""

    def add(function: F) -> F:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

        def look(lab: Lab) -> Iterator[LineFinding]:
            outcome = lab.run(name, environment=environment)
            yield from (LineFinding(*found) for found in outcome.values.get("findings", ()))
            outcome.required()

        checks.append(HpuCheck(number, title, lines, look, needs))
        return function

    return add


def judged(line: str, holds: bool, seen: str, otherwise: str = "") -> LineFinding:
    """Returns a line's finding: confirmed if it `holds`. If it does not, `otherwise` replaces `seen` as the observation."""
    return LineFinding(line, "confirmed" if holds else "refuted", seen if holds else otherwise or seen)


def skipped(lines: Iterable[str], reason: str) -> Iterator[LineFinding]:
    """Yields the findings of lines that were not examined."""
    return (LineFinding(line, "skipped", reason) for line in lines)
