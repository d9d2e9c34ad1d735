"""One watched run of a wrapped server: started in a sandbox, warmed up, and ended. Builds and the supervisor both use it.

::

    with open_sandbox(root) as sandbox, Session(plan, sandbox, phase="c") as session:
        session.wait_healthy(600)
        session.set_phase("e")
        answers = session.warm_up(requests)
        session.set_phase("v")
        session.settle(10)
        seen = session.look(compares=True)     # -> verdict.judge(seen, expected)
        session.end()

Nothing of the server outlives the block. One thread only.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import IO, Any

from aotgaudi.bundle.launch import Launch, WarmUpRequest
from aotgaudi.digest import Digest
from aotgaudi.errors import store_error
from aotgaudi.wrap.adapters.base import Address, Phase
from aotgaudi.wrap.client import HealthProbe, WrappedServerError, ask, pinned, require_free
from aotgaudi.wrap.events import EventLog, printable
from aotgaudi.wrap.file_watch import PASSING_SECONDS, FileChanges, FileRules, Watcher, compare
from aotgaudi.wrap.launch import ServerCommand
from aotgaudi.wrap.programs import Compilers, ProgramStart, new_libraries
from aotgaudi.wrap.run_options import TERMINATION_SECONDS
from aotgaudi.wrap.sandbox import Child, Sandbox
from aotgaudi.wrap.verdict import PHASES, AnswerDigests, Finding, Observation, What, has_failed, is_settled
from aotgaudi.wrap.witness import write_agent

_log = logging.getLogger(__name__)

STATE_BYTES: Mapping[Phase, str] = MappingProxyType(
    {"cold": "c", "load": "l", "measure": "m", "exercise": "e", "live": "v"}
)
"""Phase -> the state byte for the agents."""
AGENT = "witness/agent.zip"
"""Where the agent's archive lies below the root. From an archive on its path, Python imports nothing else in the folder."""
SETTLE_SECONDS = 10.0
"""How long processes may take to confirm that they have reported everything. They look four times a second."""
_POLL_SECONDS = 0.05

UNCAPTURED: Mapping[str, str] = {
    "home/*": "a server's home is that of its user again when it serves",
    "tmp/tmp*": "a temporary file of one run",
    "tmp/pymp-*": "what processes of one run shared",
}
"""Patterns of paths below the root that no capture holds, for any server, with the reason."""


@dataclass(frozen=True)
class Plan:
    """What to run, and how.

    Attributes:
        words: The whole command.
        environment: Its environment, without what the agent needs.
        address: Where it will listen.
        rules: Which files may lie below the root.
        repairs: Ids of the repairs that the agent is to make.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    address: Address
    rules: FileRules
    repairs: tuple[str, ...] = ()


def plan_for(
    found: ServerCommand,
    launch: Launch,
    sandbox: Sandbox,
    phase: Phase,
    *,
    sealed: Mapping[str, Digest] = MappingProxyType({}),
    left_out: Iterable[str] = (),
) -> Plan:
    """Returns what to run in `sandbox` at `phase`.

    Args:
        found: The command.
        launch: The launch that is built, or the sealed one. Its conditions are established: the model's alias, variables.
        sandbox: Where it runs.
        phase: The run's first phase.
        sealed: The files below the root, by path.
        left_out: Patterns of files that may appear there in addition to the adapter's.
    """
    adapter, root = found.adapter, sandbox.root
    patterns = (*(pattern for pattern, _ in adapter.left_out), *UNCAPTURED, *left_out)
    established = _established(found, launch)
    environment = adapter.environment(root, phase, established)
    if any(path.startswith("home/") for path in sealed):
        environment["HOME"] = str(root / "home")
    return Plan(
        words=adapter.command(found.words, found.flags, root, is_aliased=launch.is_aliased),
        environment=environment,
        address=found.flags.address,
        rules=FileRules(root, sealed=sealed, left_out=tuple(dict.fromkeys(patterns))),
        repairs=launch.repairs,
    )


def _established(found: ServerCommand, launch: Launch) -> dict[str, str]:
    """Returns the command's environment, with hashed variables as in the launch, except those of the pod."""
    hashed = found.adapter.variable_rules.hashed
    ours = {name for name, rule in hashed.items() if not rule.is_of_pod}
    kept = {name: value for name, value in found.environ.items() if name not in ours}
    return {**kept, **{name: value for name, value in launch.place.variables.items() if name in ours}}


def link_model(found: ServerCommand, launch: Launch, sandbox: Sandbox) -> None:
    """Makes the alias of the model's directory, if the server of `launch` uses it. Raises StoreError."""
    if not launch.is_aliased:
        return
    link = sandbox.root / "model"
    try:
        os.symlink(os.path.abspath(found.model), link)
    except OSError as error:
        raise store_error("make", link, error) from error


class Session:
    """A running server, and what is known of it. A context manager."""

    def __init__(
        self,
        plan: Plan,
        sandbox: Sandbox,
        *,
        phase: str,
        adopts: bool = False,
        output: IO[Any] | None = None,
        termination_seconds: float = TERMINATION_SECONDS,
    ) -> None:
        """Starts the server in `sandbox`, whose files have been restored, with the state byte `phase`.

        `adopts`, `output` and `termination_seconds` are those of `Child`.

        Raises:
            SpecError: The server's port is in use, or its certificate cannot be read.
            StoreError: The sandbox cannot be prepared, or the process cannot be started.
        """
        address = pinned(plan.address)
        require_free(address)
        self.sandbox, self.phase = sandbox, phase
        self.log = EventLog(sandbox.root / "events")
        self._answers: tuple[AnswerDigests, ...] | None = None
        try:
            archive = write_agent(sandbox.root / AGENT)
            rules = replace(plan.rules, agent={AGENT: archive} if plan.rules.has_sealed else {})
            self.plan = replace(plan, rules=rules, address=address)
            self._write_allowed()
        except OSError as error:
            raise store_error("prepare", sandbox.root, error) from error
        sandbox.set_state(phase)
        self._watcher = Watcher(sandbox.root, plan.rules) if plan.rules.has_sealed else None
        self._compared = FileChanges(is_watched=self._watcher is not None)
        self._started, self._began = time.monotonic(), time.time()
        self._compilers = Compilers()
        self._unreported: dict[str, Finding] = {}
        self._passed, self._searched_at = frozenset[str](), 0.0
        try:
            self.child = Child(
                plan.words,
                self._environment(),
                sandbox,
                adopts=adopts,
                output=output,
                termination_seconds=termination_seconds,
            )
        except OSError as error:  # Too many processes, or a command line that is too long.
            raise store_error("start the server in", sandbox.root, error) from error

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *raised: object) -> None:
        self.child.close()
        if self._watcher is not None:
            self._watcher.close()

    @property
    def seconds(self) -> float:
        """The time since the server was started."""
        return time.monotonic() - self._started

    def set_phase(self, byte: str) -> None:
        """Tells every process the phase; `settle` waits for their answers."""
        self.phase = byte
        self.sandbox.set_state(byte)

    def wait_healthy(self, deadline_seconds: float, on_wait: Callable[[], object] = lambda: None) -> float:
        """Waits until the server serves. Returns how many seconds that took. `on_wait` may raise to stop waiting.

        Raises:
            WrappedServerError: The server ended first, or the deadline has passed.
        """
        with closing(HealthProbe(self.plan.address)) as health:
            while True:
                on_wait()
                status = self.child.poll()
                if status is not None:
                    raise WrappedServerError(
                        f"the server ended with exit code {status} before it served", status
                    )
                if health.poll():
                    return self.seconds
                if health.problem:
                    raise WrappedServerError(health.problem)
                if self.seconds >= deadline_seconds:
                    raise WrappedServerError(f"the server did not serve within {deadline_seconds:.0f} s")
                time.sleep(_POLL_SECONDS)

    def warm_up(
        self,
        requests: Iterable[WarmUpRequest],
        *,
        on_answer: Callable[[], object] = lambda: None,
        on_wait: Callable[[], object] = lambda: None,
        needs_success: bool = False,
    ) -> tuple[AnswerDigests, ...]:
        """Sends the warm-up requests in turn. Returns each answer's digests.

        `on_wait` is called again and again while an answer is waited for, and may raise to stop. Raises WrappedServerError,
        naming the request, for a missing answer, and with `needs_success` also for an error answer, and for a batch whose
        requests did not run at the same time. Without it, such a batch is logged.
        """
        digests = []
        for request in requests:
            answer = ask(self.plan.address, request, on_wait)
            if answer.problem and not needs_success:
                _log.warning("the warm-up request %r: %s", request.name, answer.problem)
            if needs_success and (answer.status >= 400 or answer.problem):
                raise WrappedServerError(
                    f"the server answered the request {request.name!r} of the exercise with {answer.status}:"
                    f" {answer.problem or 'it does not say why'} (leave it out: --exercise smoke, and FILE for others)"
                )
            digests.append(answer.digests(is_greedy=request.is_greedy))
            on_answer()
        self._answers = tuple(digests)
        return self._answers

    def settle(self, timeout_seconds: float = SETTLE_SECONDS) -> bool:
        """Waits until every living process with an agent has confirmed the phase. Returns whether all did in time.

        Nobody waits for agents that say that they failed to, as where a bridge cannot flush.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            living = self.child.tree.living()
            self.log.read()
            missing = [
                one
                for one in self.log.processes.values()
                if one.pid in living and not is_settled(one, self.phase)
            ]
            if all(has_failed(one, self.phase) for one in missing):
                return not missing
            if time.monotonic() >= deadline or self.child.poll() is not None:
                return False
            time.sleep(_POLL_SECONDS)

    def look(self, *, phase: str | None = None, compares: bool = False) -> Observation:
        """Returns everything that is known now.

        Args:
            phase: The phase that every process must have confirmed; None: the present one.
            compares: Read and compare every sealed byte first.
        """
        living = self.child.tree.living()
        if compares:
            self._await_passing()
            self._compared = self._compared | compare(self.sandbox.root, self.plan.rules)
            self._find_libraries(living)
        files = self.files(passing_seconds=0.0 if compares else PASSING_SECONDS)
        self.log.read()  # Last: a process reports a file, or its end, before we can see either.
        return Observation(
            processes=dict(self.log.processes),
            alive=living,
            rules=self.plan.rules,
            files=files,
            phase=self.phase if phase is None else phase,
            answers=self._answers,
            unreported=self.unreported(),
        )

    def unreported(self) -> tuple[tuple[str, Finding], ...]:
        """Returns what the server's processes did without an agent's report, with the process, in the order of discovery."""
        starts = self.child.programs.take()
        self.log.read()  # Read after `take`: an agent reports a program before it starts.
        for start in self._compilers.among(starts, self._is_told):
            words = printable(" ".join(start.words))
            self._find(start.pid, "process", f"a compiler was run: {words}")
        return tuple((name.partition(":")[0], one) for name, one in self._unreported.items())

    def _is_told(self, start: ProgramStart) -> bool:
        """Whether the agent of a program's parent, or of its process before the exec, reported a compiler of that name."""
        name = os.path.basename(start.words[0]) if start.words else ""
        return any(
            event.text("what") == "compiler"
            and os.path.basename(event.text("argv").partition(" ")[0]) == name
            for log in self.log.processes.values()
            if log.pid in (start.parent, start.pid)
            for event in log.events
            if event.kind == "process"
        )

    def _find_libraries(self, living: Iterable[int]) -> None:
        """Finds code of files that were made since the start. Below the root a file that is there is sealed, or reported."""
        for path, new in new_libraries(living, self._began).items():
            if new.why or self.plan.rules.relative(path) is None:
                why = new.why or "was made since the server started"
                self._find(new.pid, "load", f"{printable(path)} was loaded, and {why}")

    def _find(self, pid: int, what: What, text: str) -> None:
        finding = Finding(what, PHASES.get(self.phase, "live"), text)
        self._unreported.setdefault(f"process {pid}: {text}", finding)

    def files(self, *, passing_seconds: float = PASSING_SECONDS) -> FileChanges:
        """Returns how files changed since the start, by inotify and by the comparisons that were made.

        A file that an agent reported and that is gone again is left out: it was a probe, a lock, or a name before the right
        one. Loading it is a finding of its own, also where a library maps it. A file that is not yet `passing_seconds` old
        may be such a file.
        """
        if self._watcher is None:
            return self._compared
        found = self._watcher.read() | self._compared
        if not found.added or not found.is_watched:
            return found
        passing = self._passing(passing_seconds)
        if passing - self._passed and self.seconds - self._searched_at > PASSING_SECONDS:
            self._passed, self._searched_at = passing, self.seconds
            self._find_libraries(self.child.tree.living())
        return replace(found, added=tuple(path for path in found.added if path not in passing))

    def _passing(self, seconds: float) -> frozenset[str]:
        if self._watcher is None:
            return frozenset()
        self.log.read()  # An agent reports a file before inotify does.
        root, written = self.plan.rules.root, self.log.written
        return frozenset(path for path in self._watcher.passing(seconds) if f"{root}/{path}" in written)

    def _await_passing(self) -> None:
        """Waits until each new file has gone, or has been there for so long that it will stay."""
        deadline = time.monotonic() + 2 * PASSING_SECONDS
        while time.monotonic() < deadline:
            if self._watcher is None or not self._watcher.read().added:
                return
            if not self._passing(PASSING_SECONDS) - self._passing(0.0):
                return
            time.sleep(_POLL_SECONDS)

    def end(self, termination_seconds: float | None = None) -> int:
        """Asks the server to end, waits, reads the last events, and returns its exit code."""
        status = self.child.end(termination_seconds)
        self.log.read()
        return status

    def _environment(self) -> dict[str, str]:
        root, before = self.sandbox.root, self.plan.environment.get("PYTHONPATH", "")
        environment = {
            **self.plan.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(root / AGENT), before))),
            "AOTGAUDI_WITNESS": str(root / "events"),
            "AOTGAUDI_WITNESS_ROOTS": json.dumps([str(root / top) for top in self.plan.rules.cache_tops]),
            "AOTGAUDI_WITNESS_STATE": str(root / "state"),
            "AOTGAUDI_WITNESS_REPAIRS": ",".join(self.plan.repairs),
        }
        environment.pop("AOTGAUDI_WITNESS_ALLOWED", None)  # Another run's would mislead this run's agents.
        if self.plan.rules.has_sealed:
            environment["AOTGAUDI_WITNESS_ALLOWED"] = str(root / "allowed")
        return environment

    def _write_allowed(self) -> None:
        """Writes the sealed paths, as the server sees them."""
        lines = sorted(str(self.sandbox.root / path) for path in self.plan.rules.sealed)
        (self.sandbox.root / "allowed").write_text(
            "".join(f"{line}\n" for line in lines), "utf-8", "surrogateescape"
        )
