"""The life of a wrapped server under supervision: started, warmed up, judged, and counted as long as it serves.

::

    starting ──health 200──▶ exercising ──all answered──▶ settling ──verdict──▶ live ──▶ the server's exit code
        └───────────────────────┴────────── not warm, ended, too late ─────────┴──▶ ended by us: 3 or 4, one sentence

Under ``--require-warm`` the first event that speaks against the server ends it. We do not wait for the server's own
reaction, since it may hang. Without the option everything is measured and reported, and nothing is refused. The main thread
runs all of this. The health question and the warm-up requests have one thread each, and the HTTP server asks through
`report`.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Literal

from aotgaudi.bundle.capture_receipt import Expected
from aotgaudi.bundle.launch import WarmUpRequest
from aotgaudi.errors import AotGaudiError, CorruptError, NotWarmError
from aotgaudi.gaudi.live_graphs import LiveGraphs
from aotgaudi.wrap.client import WrappedServerError, is_healthy
from aotgaudi.wrap.file_watch import FileChanges
from aotgaudi.wrap.http import Metrics
from aotgaudi.wrap.run_options import Policy
from aotgaudi.wrap.session import SETTLE_SECONDS, STATE_BYTES, Session
from aotgaudi.wrap.signals import ENDING, Signals
from aotgaudi.wrap.verdict import (
    EXIT_BYTES,
    EXIT_NOT_WARM,
    ONLY_FILES,
    PHASES,
    Finding,
    FindingPhase,
    NotWarm,
    Reason,
    Undecided,
    Verdict,
    Warm,
    finding_of,
    is_settled,
    judge,
)

Stage = Literal["starting", "exercising", "settling", "live", "ending"]

_TICK_SECONDS, _LIVE_TICK_SECONDS = 0.1, 0.25
_HEALTHY_SECONDS, _UNHEALTHY_SECONDS = 1.0, 0.1
"""The waits between two health questions: while the server is healthy, and while it is not."""
_EARLY_SECONDS = 1.0
_CAUSE_SECONDS = 2.0
_REPORT_SECONDS = 30.0
_LIVE_SECONDS, _COMPARED_BYTES_PER_SECOND = 30.0, 50e6
"""How long one turn of the main loop may take. A comparison of all files adds the time to read them from a slow disk."""
_MAX_REMEMBERED = 200

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a server is judged by.

    Attributes:
        expected: What a warm start shows; None if the server starts cold.
        requests: The warm-up requests to send again; empty for none.
        why_cold: Why it starts cold, in one sentence.
        about: What the report says about the capture.
        residuals: Work that no file can save, so that even a warm server does it.
        not_exercised: The features that had no warm-up requests, so that their first request may compile.
        live_graphs: Whether traffic compiles graphs of a kind although all was captured.
    """

    expected: Expected | None
    requests: Sequence[WarmUpRequest] = ()
    why_cold: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    residuals: Sequence[str] = ()
    not_exercised: Sequence[str] = ()
    live_graphs: Sequence[LiveGraphs] = ()


def refusal(reasons: Sequence[Reason]) -> AotGaudiError:
    """Returns the error for a server that is not warm: one sentence, and the number of other reasons."""
    num_others = len(reasons) - 1
    more = f" (and {num_others} more: GET /report, or the events below --root)" if num_others else ""
    error = CorruptError if reasons[0].exit_code == EXIT_BYTES else NotWarmError
    return error(f"the server is not warm: {reasons[0].text}{more}")


class _HealthProbe(threading.Thread):
    """Keeps asking the server whether it serves. `is_good` is the last answer."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="aotgaudi-health", daemon=True)
        self._address = session.plan.address
        self._stopped = threading.Event()
        self.is_good = False

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            self.is_good = is_healthy(self._address)
            self._stopped.wait(_HEALTHY_SECONDS if self.is_good else _UNHEALTHY_SECONDS)


class _WarmUp(threading.Thread):
    """Sends the warm-up requests. `error` says why some were not answered."""

    def __init__(self, session: Session, requests: Sequence[WarmUpRequest]) -> None:
        super().__init__(name="aotgaudi-warm-up", daemon=True)
        self._session, self._requests = session, requests
        self.error: WrappedServerError | None = None

    def run(self) -> None:
        try:
            self._session.warm_up(self._requests)
        except WrappedServerError as error:
            self.error = error


class _Findings:
    """Findings in events and files, counted as they come. `recent` holds the last ones. For one thread only."""

    def __init__(self, session: Session, metrics: Metrics) -> None:
        self._session, self._metrics = session, metrics
        self._files, self._is_blind = FileChanges(), False
        self._first_file: float | None = None
        self._num_outside = 0
        self.recent: tuple[Finding, ...] = ()
        self.is_new = False
        """Whether the last call of `take` saw anything new."""

    def take(self) -> list[Finding]:
        """Returns the findings since the last call, and counts them."""
        events = self._session.log.take_new()
        rules, files = self._session.plan.rules, self._session.files()
        found = [finding_of(event, rules, is_watched=files.is_watched) for event in events]
        findings = [finding for finding in found if finding is not None and finding.phase != "cold"]
        findings += [*self._outside(), *self._of_files(files), *self._of_unreadable()]
        self.is_new = bool(events or findings)
        self._metrics.count(findings)
        self.recent = (*self.recent, *findings)[-_MAX_REMEMBERED:]
        return findings

    def lack_their_cause(self, now: float) -> bool:
        """Whether only files speak against the server, and only recently: their cause, a compiler, may still be reported.

        `now` is in seconds, always of the same clock.
        """
        if not self.recent or any(one.what != "file" for one in self.recent):
            return False
        if self._first_file is None:
            self._first_file = now
        return now - self._first_file < _CAUSE_SECONDS

    def _outside(self) -> list[Finding]:
        """Returns what happened without an agent's report since the last turn."""
        found = self._session.outside()
        new, self._num_outside = found[self._num_outside :], len(found)
        return [finding for _, finding in new if finding.phase != "cold"]

    def _of_files(self, files: FileChanges) -> list[Finding]:
        """Returns changes of files since the last turn. They count, whatever the agents reported."""
        added = _new(files.added, self._files.added)
        self._metrics.count_files(len(added))
        rows = [
            *((path, "was added", EXIT_NOT_WARM) for path in added),
            *((path, "was changed", EXIT_BYTES) for path in _new(files.changed, self._files.changed)),
            *((path, "was removed", EXIT_NOT_WARM) for path in _new(files.missing, self._files.missing)),
        ]
        self._files = files
        return [Finding("file", self._phase, f"{path} {what}", exit_code=code) for path, what, code in rows]

    def _of_unreadable(self) -> list[Finding]:
        """Returns a finding if lines cannot be read, once: from then on the agents may have written anything."""
        if self._is_blind or not any(one.num_unreadable for one in self._session.log.processes.values()):
            return []
        self._is_blind = True
        return [Finding("unknown", self._phase, "events of its agents cannot be read")]

    @property
    def _phase(self) -> FindingPhase:
        return PHASES.get(self._session.phase, "live")


def _new(now: Sequence[str], before: Sequence[str]) -> list[str]:
    return sorted({*now} - {*before})


class Supervisor:
    """Supervises one server. `run` is for the main thread. Any thread may call `not_ready`, `not_live` and `report`."""

    def __init__(
        self, session: Session, case: Case, policy: Policy, metrics: Metrics, signals: Signals
    ) -> None:
        self._session, self._case, self._policy = session, case, policy
        self._metrics, self._signals = metrics, signals
        self._stage: Stage = "starting"
        self._verdict: Verdict = Undecided(("the server to start",))
        self._drained = ""
        self._after_ready: Reason | None = None
        self._is_explained = False
        self._since = self._turned = time.monotonic()
        self._asked_to_end: float | None = None
        self._asked: queue.SimpleQueue[Future[Mapping[str, Any]]] = queue.SimpleQueue()
        self._health = _HealthProbe(session)
        self._warm_up: _WarmUp | None = None
        self._findings = _Findings(session, metrics)
        self._judged_at = 0.0
        num_bytes = sum(digest.size_bytes for digest in session.plan.rules.sealed.values())
        self._turn_seconds = _LIVE_SECONDS + num_bytes / _COMPARED_BYTES_PER_SECOND

    def run(self) -> int:
        """Supervises until the server ends. Returns its exit code.

        Raises:
            NotWarmError, CorruptError: The server was not warm, and has been ended.
            WrappedServerError: It ended or hung before it was ready.
        """
        self._health.start()
        try:
            while True:
                status = self._turn()
                if status is not None:
                    return status
                self._signals.wait(_LIVE_TICK_SECONDS if self._stage == "live" else _TICK_SECONDS)
        finally:
            self._stage = "ending"
            self._health.stop()

    def not_ready(self) -> str:
        """Returns why the server must get no requests; empty if it may."""
        if self._stage != "live":
            return {
                "starting": "the server is starting",
                "exercising": "the warm-up requests are being sent",
                "settling": "the processes are being asked whether they are warm",
            }.get(self._stage, "the server is ending")
        if self._asked_to_end is not None:
            return "the server was asked to end"
        return self._drained or ("" if self._health.is_good else "the server's health is not 200")

    def not_live(self) -> str:
        """Returns why the supervisor hangs; empty if it does not."""
        seconds = time.monotonic() - self._turned
        return f"no turn for {seconds:.0f} s" if seconds > self._turn_seconds else ""

    def report(self) -> Mapping[str, Any]:
        """Returns everything that is known, after a full comparison of the files. Waits for the main thread."""
        future: Future[Mapping[str, Any]] = Future()
        self._asked.put(future)
        try:
            return future.result(_REPORT_SECONDS)
        except FutureTimeoutError:  # It is no TimeoutError before Python 3.11.
            return {"problem": self.not_live() or "no report in time"}

    def _turn(self) -> int | None:
        self._turned = time.monotonic()
        self._pass_signals_on()
        status = self._session.child.poll()
        self._act_on_news()
        if status is not None:
            return self._ended(status)
        if self._asked_to_end is None:  # Else this may fail only because the server ends.
            self._judge_early()
            self._advance()
        self._answer_reports()
        self._metrics.set("aotgaudi_guest_ready", not self.not_ready())
        return None

    def _advance(self) -> None:
        if self._stage == "starting":
            self._while_starting()
        elif self._stage == "exercising":
            self._while_exercising()
        elif self._stage == "settling":
            self._while_settling()

    def _pass_signals_on(self) -> None:
        for number in self._signals.take():
            _log.info("%s is passed on to the server", signal.Signals(number).name)
            if number in ENDING and self._asked_to_end is None:
                self._asked_to_end = time.monotonic()
            self._session.child.send(number)
        if self._asked_to_end is None or self._stage == "live":
            return  # A server that serves may finish its requests.
        if time.monotonic() - self._asked_to_end > self._policy.termination_seconds:
            self._session.end(0.0)

    def _act_on_news(self) -> None:
        """Logs new findings, and acts on them."""
        findings = self._findings.take()
        for finding in findings:
            _log.warning("%s: %s: %s", finding.phase, finding.what, finding)
            self._explain(finding)
        if self._stage == "live":
            self._act([finding for finding in findings if finding.phase == "live"])

    def _explain(self, finding: Finding) -> None:
        """Logs once, for the first compile after ready, which request caused it and what would have covered it."""
        if self._is_explained or finding.phase != "live" or finding.what in ("file", "trace", "load"):
            return
        self._is_explained = True
        asked = [f"{one.id} ({one.line})" for one in finding.requests]
        if asked:
            text = f"the requests that were computed: {'; '.join(asked)}. With such a line in --exercise FILE it is captured"
        else:
            text = "no agent knows of which request; --exercise FILE captures what a request of that kind compiles"
        _log.warning("the first compile after ready: %s: %s", finding, text)

    def _judge_early(self) -> None:
        """Judges before the server is ready, because a server that is kept from compiling may hang for ever.

        Without new events it judges only once a second, because it looks at every process of the machine.
        """
        if self._stage == "live" or not self._policy.require_warm:
            return
        if self._findings.is_new or self._turned - self._judged_at >= _EARLY_SECONDS:
            self._judged_at = self._turned
            verdict = self._judged()
            is_over = self._has_gone(verdict) or self._is_ending()
            if not self._findings.lack_their_cause(self._turned) and not is_over:
                self._refuse_if_not_warm(verdict)

    def _act(self, findings: Sequence[Finding]) -> None:
        """Acts on what was made after ready. A mere trace makes nothing, and is only reported."""
        made = sorted((one for one in findings if one.what != "trace"), key=lambda one: one.what == "file")
        if not made:  # A compiler is found before the files that it left.
            return
        self._metrics.set("aotgaudi_guest_warm", 0)
        first = self._after_ready or Reason(f"after ready: {made[0]}", made[0].exit_code)
        self._after_ready = first
        if isinstance(self._verdict, Warm):
            self._verdict = NotWarm((first,))
        if self._policy.on_compile == "drain":
            self._drained = self._drained or first.text
        elif self._policy.on_compile == "exit":
            self._refuse_if_not_warm(NotWarm((first,)))

    def _while_starting(self) -> None:
        if self._health.is_good:
            _log.info("the server serves after %.1f s", self._session.seconds)
            if not self._case.requests:
                self._settle()
                return
            self._session.set_phase(STATE_BYTES["exercise"])
            self._warm_up = _WarmUp(self._session, self._case.requests)
            self._warm_up.start()
            self._enter("exercising")
        elif self._session.seconds > self._policy.start_seconds:
            self._session.end()
            raise WrappedServerError(
                f"the server did not serve within {self._policy.start_seconds:.0f} s, and was ended (--ready-timeout)",
                3,
            )

    def _while_exercising(self) -> None:
        assert self._warm_up is not None
        if self._warm_up.is_alive():
            return
        error = self._warm_up.error
        if error is not None:
            _log.warning("a warm-up request failed: %s", error, extra={"request_id": error.request_id})
            verdict = self._judged()
            causes = verdict.reasons if isinstance(verdict, NotWarm) else ()
            verdict = NotWarm((*causes, Reason(f"a warm-up request failed: {error}")))
            if self._policy.require_warm and not self._has_gone(verdict):
                self._refuse_if_not_warm(verdict)
        self._settle()

    def _settle(self) -> None:
        self._session.set_phase(self._policy.live_byte)
        self._enter("settling")

    def _while_settling(self) -> None:
        if self._case.expected is None:
            self._become_ready(NotWarm((Reason(self._case.why_cold),)))
            return
        verdict = self._judged()
        if verdict == ONLY_FILES:  # All processes have answered; read every byte once.
            verdict = self._judged(compares=True)
        if isinstance(verdict, Undecided):
            if time.monotonic() - self._since < SETTLE_SECONDS:
                return
            verdict = NotWarm(tuple(Reason(f"we waited in vain for {what}") for what in verdict.waiting_for))
        if self._has_gone(verdict):
            return
        if self._policy.require_warm:
            self._refuse_if_not_warm(verdict)
        self._become_ready(verdict)

    def _judged(self, *, compares: bool = False) -> Verdict:
        if self._case.expected is not None:
            self._verdict = judge(
                self._session.look(phase=self._policy.live_byte, compares=compares), self._case.expected
            )
        return self._verdict

    def _has_gone(self, verdict: Verdict) -> bool:
        """Whether the server has ended. That may be what speaks against it. The next turn reports the exit code."""
        return (
            isinstance(verdict, NotWarm) and self._session.child.pid not in self._session.child.tree.living()
        )

    def _is_ending(self) -> bool:
        """Whether all processes report that they end and nothing else speaks against the server: its exit code says why."""
        processes = self._session.log.processes.values()
        is_said = self._stage != "settling" and all(
            is_settled(one, self._policy.live_byte) for one in processes
        )
        return is_said and not self._findings.recent

    def _refuse_if_not_warm(self, verdict: Verdict) -> None:
        if not isinstance(verdict, NotWarm):
            return
        self._verdict = verdict
        for reason in verdict.reasons:
            _log.error("not warm: %s", reason.text)
        self._session.end()
        raise refusal(verdict.reasons)

    def _become_ready(self, verdict: Verdict) -> None:
        self._verdict = verdict
        if isinstance(verdict, NotWarm):
            for reason in verdict.reasons:
                _log.warning("not warm: %s", reason.text)
        self._metrics.set("aotgaudi_guest_warm", isinstance(verdict, Warm))
        self._metrics.set("aotgaudi_guest_ready_seconds", self._session.seconds)
        self._count_processes()
        _log.info(
            "ready after %.1f s: %s",
            self._session.seconds,
            "warm" if isinstance(verdict, Warm) else "not warm",
        )
        self._enter("live")

    def _count_processes(self) -> None:
        expected = self._case.expected
        wanted = sum(expected.roles.values()) if expected is not None else 0
        roles = expected.roles if expected is not None else {}
        present = sum(one.role in roles for one in self._session.log.processes.values())
        states = {"expected": wanted, "present": present, "blind": max(0, wanted - present)}
        loads = sum(sum(one.loads.values()) for one in self._session.log.processes.values())
        for state, number in states.items():
            self._metrics.set("aotgaudi_witness_processes", number, state)
        self._metrics.set(
            "aotgaudi_guest_artifacts", sum(expected.loads.values()) if expected else 0, "expected"
        )
        self._metrics.set("aotgaudi_guest_artifacts", loads, "loaded")

    def _enter(self, stage: Stage) -> None:
        self._stage, self._since = stage, time.monotonic()

    def _ended(self, status: int) -> int:
        """Returns the exit code of a server that ended. Raises if it failed before it was ready, or was not warm."""
        self._session.child.end()  # Ends the processes that it left.
        is_live, is_asked = self._stage == "live", self._asked_to_end is not None
        if not is_asked and self._after_ready is not None and self._policy.on_compile == "refuse":
            self._refuse_if_not_warm(NotWarm((self._after_ready,)))
        if not is_asked and not is_live and self._policy.require_warm and self._findings.recent:
            self._refuse_if_not_warm(self._judged())
        if is_asked or is_live or status == 0:
            _log.info("the server ended with exit code %d", status)
            return status
        line = self._session.child.last_line()
        says = f"; its last line: {line}" if line else "; its own messages say why"
        raise WrappedServerError(
            f"the server ended with exit code {status} before it was ready{self._loaded()}{says}", status
        )

    def _loaded(self) -> str:
        """Returns how far the server came. It may end because its cache does not load, or because a repair is missing."""
        expected = self._case.expected
        if expected is None or not expected.loads:
            return ""
        processes = self._session.log.processes.values()
        if not any(one.role in expected.roles for one in processes):
            return ", and none of its processes had an agent (start it without -E, -I or -S, and leave PYTHONPATH alone)"
        loaded = sum(sum(one.loads.values()) for one in processes)
        wanted = sum(expected.loads.values())
        return f", with {loaded} of {wanted} artifacts loaded"

    def _answer_reports(self) -> None:
        """Compares the files once, and answers every report that was requested since the last turn."""
        asked = [self._asked.get() for _ in range(self._asked.qsize())]
        report = self._report() if asked else {}
        for future in asked:
            future.set_result(report)

    def _report(self) -> Mapping[str, Any]:
        seen = self._session.look(compares=self._session.plan.rules.has_sealed)
        verdict = self._verdict
        return {
            **self._case.about,
            "stage": self._stage,
            "not_ready": self.not_ready(),
            "verdict": type(verdict).__name__,
            "reasons": [reason.text for reason in verdict.reasons] if isinstance(verdict, NotWarm) else [],
            "waiting_for": list(verdict.waiting_for) if isinstance(verdict, Undecided) else [],
            "why_cold": self._case.why_cold,
            "residuals": list(self._case.residuals),
            "not_exercised": list(self._case.not_exercised),
            "live_graphs": [row.model_dump() for row in self._case.live_graphs],
            "compilations": dict(self._metrics.compilations()),
            "findings": [f"{one.phase}: {one.what}: {one}" for one in self._findings.recent],
            "processes": [
                {
                    "pid": one.pid,
                    "role": one.role,
                    "name": one.title,
                    "is_alive": one.pid in seen.alive,
                    "hooks": dict(one.hooks),
                    "counters": dict(one.counters),
                    "loads": dict(one.loads),
                }
                for one in seen.processes.values()
            ],
            "files": {
                "added": list(seen.files.added),
                "changed": list(seen.files.changed),
                "missing": list(seen.files.missing),
                "is_compared": seen.files.is_compared,
                "is_watched": seen.files.is_watched,
            },
            "programs": {"is_watched": self._session.child.programs.is_watching},
        }
