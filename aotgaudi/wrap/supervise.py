"""Steps 3 to 5 of a run (`aotgaudi.wrap.run`): restores the sealed files, and starts and supervises the server.

The server is warmed up, judged, and counted as long as it serves.

::

    starting ──health 200──▶ exercising ──all answered──▶ settling ──verdict──▶ live ──▶ the server's exit code
        └───────────────────────┴────────── not warm, ended, too late ─────────┴──▶ ended by us: 3 or 4, one sentence

Under ``--require-warm`` the first event that speaks against the server ends it. We do not wait for the server's own
reaction, since it may hang. Without the option everything is measured and reported, and nothing is refused.

One thread does all of this, in turns: it takes signals, polls the server, the observer and the server's health, and judges.
Whatever it waits for, it takes turns meanwhile. Each turn leaves a frozen `Snapshot`, which the HTTP server reads.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from aotgaudi.bundle.capture_receipt import Expected, StartCost
from aotgaudi.bundle.launch import Launch, WarmUpRequest
from aotgaudi.errors import AotGaudiError, CorruptError, NotWarmError
from aotgaudi.gaudi.live_graphs import not_closed
from aotgaudi.wrap.adapters.base import Phase
from aotgaudi.wrap.client import HealthProbe, WrappedServerError
from aotgaudi.wrap.exercise import adapter_names, with_adapters
from aotgaudi.wrap.file_watch import FileChanges
from aotgaudi.wrap.http import Answers, HttpServer, Metrics
from aotgaudi.wrap.launch import ServerCommand
from aotgaudi.wrap.launch_comparison import Checked
from aotgaudi.wrap.observe import Observer
from aotgaudi.wrap.restore import restore
from aotgaudi.wrap.run_options import Policy, RunOptions
from aotgaudi.wrap.sandbox import open_sandbox
from aotgaudi.wrap.session import SETTLE_SECONDS, STATE_BYTES, Session, link_model, plan_for
from aotgaudi.wrap.signals import ENDING, Signals
from aotgaudi.wrap.verdict import (
    EXIT_BYTES,
    ONLY_FILES,
    Finding,
    NotWarm,
    Observation,
    Reason,
    Undecided,
    Verdict,
    Warm,
    is_settled,
    judge,
)

Stage = Literal["starting", "exercising", "settling", "live", "ending"]

_TICK_SECONDS, _LIVE_TICK_SECONDS = 0.1, 0.25
_LIVE_LOOK_SECONDS = 5.0
"""How old the list of living processes in a report may be."""
_LIVE_SECONDS, _COMPARED_BYTES_PER_SECOND = 30.0, 50e6
"""How long one turn may take. A comparison of all files adds the time to read them from a slow disk."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a server is judged by.

    Attributes:
        expected: What a warm start shows; None if the server starts cold.
        requests: The warm-up requests to send again; empty for none.
        why_cold: Why it starts cold, in one sentence.
        about: What the report says about the capture.
    """

    expected: Expected | None
    requests: Sequence[WarmUpRequest] = ()
    why_cold: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


def refusal(reasons: Sequence[Reason]) -> AotGaudiError:
    """Returns the error for a server that is not warm: one sentence, and the number of other reasons."""
    num_others = len(reasons) - 1
    more = f" (and {num_others} more: GET /report, or the events below --root)" if num_others else ""
    error = CorruptError if reasons[0].exit_code == EXIT_BYTES else NotWarmError
    return error(f"the server is not warm: {reasons[0].text}{more}")


_STARTING = Undecided(("the server to start",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was known at the end of a turn.

    Attributes:
        stage: Of the server's life.
        not_ready: Why the server must get no requests; empty if it may.
        verdict: The last one.
        recent: The last findings.
        seen: The processes and the files; None before the first look.
        has_program_watch: Whether the kernel tells of every program that is started.
    """

    stage: Stage = "starting"
    not_ready: str = "the server is starting"
    verdict: Verdict = _STARTING
    recent: Sequence[Finding] = ()
    seen: Observation | None = None
    has_program_watch: bool = False

    def report(self, case: Expectation, compilations: Mapping[str, int]) -> dict[str, Any]:
        """Returns the answer to ``GET /report``."""
        verdict, seen = self.verdict, self.seen
        processes = () if seen is None else seen.processes.values()
        alive = frozenset() if seen is None else seen.alive
        files = FileChanges() if seen is None else seen.files
        return {
            **case.about,
            "stage": self.stage,
            "not_ready": self.not_ready,
            "verdict": type(verdict).__name__,
            "reasons": [reason.text for reason in verdict.reasons] if isinstance(verdict, NotWarm) else [],
            "waiting_for": list(verdict.waiting_for) if isinstance(verdict, Undecided) else [],
            "why_cold": case.why_cold,
            "compilations": dict(compilations),
            "findings": [f"{one.phase}: {one.what}: {one}" for one in self.recent],
            "processes": [
                {
                    "pid": one.pid,
                    "role": one.role,
                    "name": one.title,
                    "is_alive": one.pid in alive,
                    "hooks": dict(one.hooks),
                    "counters": dict(one.counters),
                    "loads": dict(one.loads),
                }
                for one in processes
            ],
            "files": {
                "added": list(files.added),
                "changed": list(files.changed),
                "missing": list(files.missing),
                "is_compared": files.is_compared,
                "is_watched": files.is_watched,
            },
            "programs": {"is_watched": self.has_program_watch},
        }


class _Over(Exception):  # noqa: N818 - no error: it takes the server's exit code out of whatever waits
    """The server has ended, with this exit code, or with an error of ours."""

    def __init__(self, outcome: int | WrappedServerError) -> None:
        self.outcome = outcome


class Supervisor:
    """Supervises one server. `run` is for the main thread. Any thread may call `not_ready`, `not_live` and `report`."""

    def __init__(
        self, session: Session, case: Expectation, policy: Policy, metrics: Metrics, signals: Signals
    ) -> None:
        self._session, self._case, self._policy = session, case, policy
        self._metrics, self._signals = metrics, signals
        self._stage: Stage = "starting"
        self._verdict: Verdict = _STARTING
        self._is_explained = False
        self._turned = time.monotonic()
        self._asked_to_end: float | None = None
        self._health = HealthProbe(session.plan.address)
        self._observer = Observer(session, left_out=frozenset({"cold"}))
        self._seen: Observation | None = None
        self._looked_at = 0.0
        self._snapshot = Snapshot()
        num_bytes = sum(digest.size_bytes for digest in session.plan.rules.sealed.values())
        self._turn_seconds = _LIVE_SECONDS + num_bytes / _COMPARED_BYTES_PER_SECOND

    def run(self) -> int:
        """Supervises until the server ends. Returns its exit code.

        Raises:
            NotWarmError, CorruptError: The server was not warm, and has been ended.
            WrappedServerError: It ended or hung before it was ready.
        """
        with closing(self._health):
            try:
                self._await_health()
                self._exercise()
                self._settle()
                self._await_end()
            except _Over as over:
                if isinstance(over.outcome, int):
                    return over.outcome
                raise over.outcome from None
            finally:
                self._stage = "ending"
                self._keep_snapshot()

    def not_ready(self) -> str:
        """Returns why the server must get no requests; empty if it may."""
        return self._snapshot.not_ready

    def not_live(self) -> str:
        """Returns why the supervisor hangs; empty if it does not."""
        seconds = time.monotonic() - self._turned
        return f"no turn for {seconds:.0f} s" if seconds > self._turn_seconds else ""

    def report(self) -> Mapping[str, Any]:
        """Returns what was known at the end of the last turn."""
        return self._snapshot.report(self._case, self._metrics.compilations())

    def _why_not_ready(self) -> str:
        if self._stage != "live":
            return {
                "starting": "the server is starting",
                "exercising": "the warm-up requests are being sent",
                "settling": "the processes are being asked whether they are warm",
            }.get(self._stage, "the server is ending")
        if self._asked_to_end is not None:
            return "the server was asked to end"
        return "" if self._health.is_good else "the server's health is not 200"

    def _await_health(self) -> None:
        while not self._health.is_good:
            why, most = self._health.problem, self._policy.start_seconds
            if self._session.seconds > most:
                why = f"the server did not serve within {most:.0f} s, and was ended (--ready-timeout)"
            if why:
                self._session.end()
                raise WrappedServerError(why, 3)
            self._step()
        _log.info("the server serves after %.1f s", self._session.seconds)

    def _exercise(self) -> None:
        """Sends the warm-up requests."""
        if not self._case.requests:
            return
        self._session.set_phase(STATE_BYTES["exercise"])
        self._stage = "exercising"
        try:
            self._session.warm_up(self._case.requests, on_wait=self._meanwhile)
        except WrappedServerError as error:
            self._step()  # A server that was asked to end need not answer.
            _log.warning("a warm-up request failed: %s", error, extra={"request_id": error.request_id})
            verdict = self._judged()
            causes = verdict.reasons if isinstance(verdict, NotWarm) else ()
            verdict = NotWarm((*causes, Reason(f"a warm-up request failed: {error}")))
            if self._policy.require_warm and not self._has_gone(verdict):
                self._refuse_if_not_warm(verdict)

    def _settle(self) -> None:
        """Waits until all processes have reported what they did, and judges the server."""
        self._session.set_phase(STATE_BYTES["live"])
        self._stage, began = "settling", time.monotonic()
        self._go_on()
        if self._case.expected is None:
            self._become_ready(NotWarm((Reason(self._case.why_cold),)))
            return
        while True:
            verdict = self._judged()
            if verdict == ONLY_FILES:  # All processes have answered; read every byte once.
                verdict = self._judged(compares=True)
            if not isinstance(verdict, Undecided) or time.monotonic() - began >= SETTLE_SECONDS:
                break
            self._step()
        if isinstance(verdict, Undecided):
            verdict = NotWarm(tuple(Reason(f"we waited in vain for {what}") for what in verdict.waiting_for))
        if self._has_gone(verdict):
            self._await_end()
        if self._policy.require_warm:
            self._refuse_if_not_warm(verdict)
        self._become_ready(verdict)

    def _await_end(self) -> NoReturn:
        while True:
            self._step()

    def _step(self) -> None:
        """Waits a moment, and takes a turn; see `_go_on`."""
        self._signals.wait(_LIVE_TICK_SECONDS if self._stage == "live" else _TICK_SECONDS)
        self._go_on()

    def _meanwhile(self) -> None:
        """Takes a turn unless the last one was only just now; see `_go_on`."""
        if time.monotonic() - self._turned >= _TICK_SECONDS:
            self._go_on()

    def _go_on(self) -> None:
        """Takes a turn. Raises `_Over` once the server has ended.

        Nothing else goes on once a server that is not live was asked to end: what fails may fail because of that.
        """
        while True:
            try:
                status = self._turn()
            except WrappedServerError as error:
                raise _Over(error) from None
            if status is not None:
                raise _Over(status)
            if self._asked_to_end is None or self._stage == "live":
                return
            self._signals.wait(_TICK_SECONDS)

    def _turn(self) -> int | None:
        """Returns the server's exit code if it has ended."""
        self._turned = time.monotonic()
        self._pass_signals_on()
        status = self._session.child.poll()
        self._act_on_news()
        if status is not None:
            return self._ended(status)
        self._health.poll()
        if self._asked_to_end is None:  # Else this may fail only because the server ends.
            self._judge_early()
        self._keep_snapshot()
        return None

    def _keep_snapshot(self) -> None:
        session = self._session
        if self._turned - self._looked_at >= _LIVE_LOOK_SECONDS and self._stage != "ending":
            self._look()
        seen = self._seen
        if seen is not None:
            seen = replace(seen, processes=dict(session.log.processes), files=self._observer.files)
        self._snapshot = Snapshot(
            stage=self._stage,
            not_ready=self._why_not_ready(),
            verdict=self._verdict,
            recent=self._observer.recent,
            seen=seen,
            has_program_watch=session.child.programs.is_watching,
        )
        self._metrics.set("aotgaudi_guest_ready", not self._snapshot.not_ready)

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
        """Logs and counts new findings, and acts on them."""
        num_added = self._observer.num_added
        findings = self._observer.poll()
        self._metrics.count(findings)
        self._metrics.count_files(self._observer.num_added - num_added)
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

        Without news it judges only now and then, because it looks at every process of the machine.
        """
        if self._stage == "live" or not self._policy.require_warm:
            return
        if self._observer.is_due(self._turned):
            verdict = self._judged()
            is_over = self._has_gone(verdict) or self._is_ending()
            if not self._observer.lacks_cause(self._turned) and not is_over:
                self._refuse_if_not_warm(verdict)

    def _act(self, findings: Sequence[Finding]) -> None:
        """Acts on what was made after ready. A mere trace makes nothing, and is only reported."""
        made = sorted((one for one in findings if one.what != "trace"), key=lambda one: one.what == "file")
        if not made:  # A compiler is found before the files that it left.
            return
        self._metrics.set("aotgaudi_guest_warm", 0)
        verdict = NotWarm((Reason(f"after ready: {made[0]}", made[0].exit_code),))
        if self._policy.on_compile == "exit":
            self._refuse_if_not_warm(verdict)
        if isinstance(self._verdict, Warm):
            self._verdict = verdict

    def _judged(self, *, compares: bool = False) -> Verdict:
        if self._case.expected is not None:
            self._verdict = judge(self._look(compares=compares), self._case.expected)
        return self._verdict

    def _look(self, *, compares: bool = False) -> Observation:
        self._looked_at = time.monotonic()
        self._seen = self._session.look(phase=STATE_BYTES["live"], compares=compares)
        return self._seen

    def _has_gone(self, verdict: Verdict) -> bool:
        """Whether the server has ended. That may be what speaks against it. The next turn reports the exit code."""
        return (
            isinstance(verdict, NotWarm) and self._session.child.pid not in self._session.child.tree.living()
        )

    def _is_ending(self) -> bool:
        """Whether all processes report that they end and nothing else speaks against the server: its exit code says why."""
        processes = self._session.log.processes.values()
        is_said = self._stage != "settling" and all(is_settled(one, STATE_BYTES["live"]) for one in processes)
        return is_said and not self._observer.recent

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
        self._stage = "live"

    def _count_processes(self) -> None:
        expected = self._case.expected or Expected()
        logs = self._session.log.processes.values()
        wanted, present = sum(expected.roles.values()), sum(one.role in expected.roles for one in logs)
        states = {"expected": wanted, "present": present, "blind": max(0, wanted - present)}
        for state, number in states.items():
            self._metrics.set("aotgaudi_witness_processes", number, state)
        loaded = sum(sum(one.loads.values()) for one in logs)
        for state, number in {"expected": sum(expected.loads.values()), "loaded": loaded}.items():
            self._metrics.set("aotgaudi_guest_artifacts", number, state)

    def _ended(self, status: int) -> int:
        """Returns the exit code of a server that ended. Raises if it failed before it was ready, or was not warm."""
        self._session.child.end()  # Ends the processes that it left.
        is_live, is_asked = self._stage == "live", self._asked_to_end is not None
        if not is_asked and not is_live and self._policy.require_warm and self._observer.recent:
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


def start(options: RunOptions, checked: Checked, signals: Signals) -> int:
    """Restores, starts and supervises a server until it ends. Returns its exit code. Raises like `run.run`."""
    bundle, why_cold = checked.bundle, checked.why_cold
    receipt = bundle.require_capture()
    labels = {"launch": receipt.manifest_id, "bundle": str(bundle.path)}
    metrics = Metrics()
    metrics.set("aotgaudi_verify_seconds", time.monotonic() - options.began)
    metrics.set("aotgaudi_guest_residuals", len(receipt.residuals))
    metrics.set("aotgaudi_capture_info", 1, *labels.values())
    restoring = Answers(
        not_ready=lambda: "the sealed files are being restored",
        not_live=lambda: "",
        report=lambda: {"stage": "restoring"},
        metrics=metrics,
        notes={"not_exercised": receipt.not_exercised, "not_closed": not_closed(receipt.live_graphs)},
    )
    with (
        HttpServer(options.listen, restoring) as server,
        open_sandbox(Path(checked.here.place.root), needed_bytes=receipt.num_bytes) as sandbox,
    ):
        _log.info("http://%s:%d: /ready /live /metrics /report", options.listen.host, server.port)
        if not why_cold:
            restored = restore(bundle, sandbox.root)
            metrics.set("aotgaudi_restore_seconds", restored.seconds)
            _log.info("%d files, %d bytes, verified and restored in %.2f s", *astuple(restored))
        link_model(checked.found, checked.launch, sandbox)
        asked = _asked_here(bundle.launch, checked.found, receipt.start)
        if receipt.start is not None and options.exercises and not why_cold:
            _log.info("a start sends %s", receipt.start)
        answers = tuple(one for index, one in enumerate(receipt.expected.answers) if index in asked)
        case = Expectation(
            expected=None if why_cold else receipt.expected.model_copy(update={"answers": answers}),
            requests=tuple(asked.values()) if options.exercises else (),
            why_cold=why_cold,
            about={
                **labels,
                "residuals": list(receipt.residuals),
                "not_exercised": list(receipt.not_exercised),
                "live_graphs": [row.model_dump() for row in receipt.live_graphs],
            },
        )
        phase: Phase = "cold" if why_cold else "load" if options.policy.require_warm else "measure"
        sealed = {} if why_cold else {file.path: file.digest for file in receipt.files}
        left_out = tuple(one.pattern for one in receipt.left_out)
        plan = plan_for(checked.found, checked.launch, sandbox, phase, sealed=sealed, left_out=left_out)
        signals.hold()
        with Session(
            plan,
            sandbox,
            phase=STATE_BYTES[phase],
            adopts=True,
            termination_seconds=options.policy.termination_seconds,
        ) as session:
            supervisor = Supervisor(session, case, options.policy, metrics, signals)
            server.answer_by(
                replace(
                    restoring,
                    not_ready=supervisor.not_ready,
                    not_live=supervisor.not_live,
                    report=supervisor.report,
                )
            )
            return supervisor.run()


def _asked_here(sealed: Launch, found: ServerCommand, cost: StartCost | None) -> dict[int, WarmUpRequest]:
    """Returns the sealed requests that a start sends, in the form in which they are sent here, by position."""
    start = found.adapter.starts_at(sealed.words)
    words = sealed.words if start is None else sealed.words[start[1] :]
    then, now = (
        adapter_names(values.get("lora-modules", []))
        for values in (found.adapter.read(words, {}).values, found.flags.values)
    )
    asks_all = cost is None or cost.asks_all
    asked = with_adapters(sealed.exercise.requests, then, now)
    return {index: request for index, request in asked.items() if asks_all or request.at_start}
