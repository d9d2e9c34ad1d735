"""What is new of a guest since its judge last looked: what its witnesses said, and what was seen of its files.

What asks a guest while its judge looks elsewhere: whether it serves, and its exercise. A thread each.

The life of a guest under supervision: started, exercised, judged, and counted as long as it serves.

::

    starting ──health 200──▶ exercising ──all answered──▶ settling ──verdict──▶ live ──▶ the guest's exit code
        └───────────────────────┴────────── not warm, ended, too late ─────────┴──▶ ended by us: 3 or 4, one sentence

Under ``--require-warm`` the first word that speaks against it ends the guest: on that word, not on what the guest makes of
it, which may be to hang. Without it everything is measured and told, and nothing is refused. One thread runs all of this;
the exercise and the health question have one each, and the front asks by `report`.

What was admitted is restored, started, watched and judged: from the first thing that is written to the guest's end.
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
from pathlib import Path
from typing import Any, Literal

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.capture_receipt import Expected
from aotgaudi.bundle.launch import WarmUpRequest
from aotgaudi.errors import AotGaudiError, CorruptError, NotWarmError, TargetError
from aotgaudi.wrap.adapters.base import Phase
from aotgaudi.wrap.client import WrappedServerError, is_healthy
from aotgaudi.wrap.file_watch import FileChanges
from aotgaudi.wrap.http import Answers, HttpServer, Metrics
from aotgaudi.wrap.readiness import Prepared, RunOptions
from aotgaudi.wrap.restore import restore
from aotgaudi.wrap.run_options import Policy
from aotgaudi.wrap.sandbox import Sandbox, open_sandbox
from aotgaudi.wrap.session import SETTLE_SECONDS, Session, link_model, plan_for
from aotgaudi.wrap.signals import ENDING, Signals
from aotgaudi.wrap.verdict import (
    EXIT_BYTES,
    EXIT_NOT_WARM,
    ONLY_FILES,
    PHASES,
    Finding,
    NotWarm,
    Reason,
    Undecided,
    Verdict,
    Warm,
    finding_of,
    is_settled,
    judge,
)

_MAX_REMEMBERED = 200
_CAUSE_SECONDS = 0.5


class News:
    """The findings of a session, counted as they come; `findings` are the last of them. One thread only."""

    def __init__(self, session: Session, metrics: Metrics) -> None:
        self._session, self._metrics = session, metrics
        self._files, self._is_blind = FileChanges(), False
        self._first_file: float | None = None
        self.findings: tuple[Finding, ...] = ()
        self.is_new = False
        """Whether there was anything when it was last taken."""

    def take(self) -> list[Finding]:
        """Returns what was found since the last time, and counts it."""
        rules = self._session.plan.rules
        said = self._session.news()
        found = [finding_of(event, rules) for event in said]
        findings = [finding for finding in found if finding is not None and finding.phase != "cold"]
        findings += [*self._of_files(), *self._of_unreadable()]
        self.is_new = bool(said or findings)
        self._metrics.count(findings)
        self.findings = (*self.findings, *findings)[-_MAX_REMEMBERED:]
        return findings

    def lack_their_cause(self, now: float) -> bool:
        """Whether files alone speak against it, and only just now: who wrote a source runs a compiler next, and says so.

        `now` is by one clock, in seconds.
        """
        if not self.findings or any(one.what != "file" for one in self.findings):
            return False
        if self._first_file is None:
            self._first_file = now
        return now - self._first_file < _CAUSE_SECONDS

    def _of_files(self) -> list[Finding]:
        """What was seen of files since the last turn: the second witness counts for itself."""
        files = self._session.files()
        self._metrics.count_files(len(_new(files.added, self._files.added)))
        news = [
            *((path, "was added", EXIT_NOT_WARM) for path in _new(files.added, self._files.added)),
            *((path, "was changed", EXIT_BYTES) for path in _new(files.changed, self._files.changed)),
            *((path, "was removed", EXIT_NOT_WARM) for path in _new(files.missing, self._files.missing)),
        ]
        self._files = files
        phase = PHASES.get(self._session.phase, "live")
        return [Finding("file", phase, f"{path} {what}", exit_code=code) for path, what, code in news]

    def _of_unreadable(self) -> list[Finding]:
        """Once: from then on its witnesses may have said anything."""
        is_blind = any(one.num_unreadable for one in self._session.account.histories.values())
        is_new, self._is_blind = is_blind and not self._is_blind, is_blind or self._is_blind
        phase = PHASES.get(self._session.phase, "live")
        return [Finding("unknown", phase, "events of its witnesses cannot be read")] if is_new else []


def _new(now: Sequence[str], before: Sequence[str]) -> list[str]:
    return sorted({*now} - {*before})


_BETWEEN_SECONDS, _UNTIL_GOOD_SECONDS = 1.0, 0.1


class HealthProbe:
    """Asks the guest again and again, in a thread of its own, whether it serves: `is_good` says what it answered last."""

    def __init__(self, session: Session) -> None:
        self._address = session.plan.address
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="aotgaudi-health", daemon=True)
        self.is_good = False

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Asks no more."""
        self._stopped.set()

    def _ask(self) -> None:
        while not self._stopped.is_set():
            self.is_good = is_healthy(self._address)
            self._stopped.wait(_BETWEEN_SECONDS if self.is_good else _UNTIL_GOOD_SECONDS)


class WarmUpThread(threading.Thread):
    """Sends the exercise, in a thread of its own; `error` says why it did not come to its end."""

    def __init__(self, session: Session, requests: Sequence[WarmUpRequest]) -> None:
        super().__init__(name="aotgaudi-exercise", daemon=True)
        self._session, self._requests = session, requests
        self.error: WrappedServerError | None = None

    def run(self) -> None:
        """Part of threading."""
        try:
            self._session.send_all(self._requests)
        except WrappedServerError as error:
            self.error = error


Stage = Literal["starting", "exercising", "settling", "live", "ending"]

_TICK_SECONDS, _LIVE_TICK_SECONDS = 0.1, 0.25
_EARLY_SECONDS = 1.0
_REPORT_SECONDS = 30.0
_LIVE_SECONDS, _COMPARED_BYTES_PER_SECOND = 30.0, 50e6
"""How long the main loop may take for a turn; and besides, for comparing all that is sealed, on a slow disk."""
_ERRORS: Mapping[int, type[AotGaudiError]] = {3: NotWarmError, 4: CorruptError, 5: TargetError}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be judged.

    Attributes:
        expected: What a warm start shows; None where the guest starts cold, which `why_cold` explains.
        requests: The exercise to replay; empty for none.
        why_cold: One sentence.
        about: What the report says of the capture.
        residuals: What no file holds, so that even a warm guest does it.
    """

    expected: Expected | None
    requests: Sequence[WarmUpRequest] = ()
    why_cold: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    residuals: Sequence[str] = ()


def refusal(reasons: Sequence[Reason]) -> AotGaudiError:
    """Returns the error for a guest that is not warm: one sentence, and how many others there are."""
    more = (
        f" (and {len(reasons) - 1} more: GET /report, or the events in the place)" if len(reasons) > 1 else ""
    )
    error = _ERRORS.get(reasons[0].exit_code, NotWarmError)
    return error(f"the guest is not warm: {reasons[0].text}{more}")


class Supervisor:
    """Supervises one guest. `run` is for the main thread; `not_ready`, `not_live` and `report` are for any."""

    def __init__(
        self, session: Session, case: Case, policy: Policy, metrics: Metrics, signals: Signals
    ) -> None:
        self._session, self._case, self._policy = session, case, policy
        self._metrics, self._signals = metrics, signals
        self._stage: Stage = "starting"
        self._verdict: Verdict = Undecided(("the guest to start",))
        self._drained = ""
        self._since = self._turned = time.monotonic()
        self._asked_to_end: float | None = None
        self._asked: queue.SimpleQueue[Future[Mapping[str, Any]]] = queue.SimpleQueue()
        self._health = HealthProbe(session)
        self._exercise: WarmUpThread | None = None
        self._news = News(session, metrics)
        self._judged_at = 0.0
        num_bytes = sum(digest.size_bytes for digest in session.plan.rules.sealed.values())
        self._turn_seconds = _LIVE_SECONDS + num_bytes / _COMPARED_BYTES_PER_SECOND

    def run(self) -> int:
        """Supervises until the guest ends; returns its exit code.

        Raises:
            NotWarmError, CorruptError: it was not warm, and has been ended.
            GuestError: it ended or hung before it was ready.
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
        """Why the guest is not to get requests; empty where it is."""
        if self._stage != "live":
            return {
                "starting": "the guest is starting",
                "exercising": "the exercise is being replayed",
                "settling": "the guest's processes are being asked whether they are warm",
            }.get(self._stage, "the guest is ending")
        if self._asked_to_end is not None:
            return "the guest was asked to end"
        return self._drained or ("" if self._health.is_good else "the guest's health is not 200")

    def not_live(self) -> str:
        """Why the supervisor hangs; empty where it does not."""
        seconds = time.monotonic() - self._turned
        return f"no turn for {seconds:.0f} s" if seconds > self._turn_seconds else ""

    def report(self) -> Mapping[str, Any]:
        """Returns everything that is known, after a full comparison of the files. Waits for the main thread."""
        future: Future[Mapping[str, Any]] = Future()
        self._asked.put(future)
        try:
            return future.result(_REPORT_SECONDS)
        except FutureTimeoutError:  # Before Python 3.11 it is no TimeoutError.
            return {"problem": self.not_live() or "no report in time"}

    def _turn(self) -> int | None:
        self._turned = time.monotonic()
        self._pass_signals_on()
        status = self._session.child.poll()
        self._take_news()
        if status is not None:
            return self._ended(status)
        self._judge_early()
        if self._stage == "starting":
            self._while_starting()
        elif self._stage == "exercising":
            self._while_exercising()
        elif self._stage == "settling":
            self._while_settling()
        self._answer_reports()
        self._metrics.set("aotgaudi_guest_ready", not self.not_ready())
        return None

    def _pass_signals_on(self) -> None:
        for number in self._signals.take():
            _log.info("%s is passed on to the guest", signal.Signals(number).name)
            if number in ENDING and self._asked_to_end is None:
                self._asked_to_end = time.monotonic()
            self._session.child.send(number)
        if self._asked_to_end is None or self._stage == "live":
            return  # A guest that serves ends its requests in its own time.
        if time.monotonic() - self._asked_to_end > self._policy.grace_seconds:
            self._session.end(0.0)

    def _take_news(self) -> None:
        """Logs what was said and seen, and acts on it."""
        findings = self._news.take()
        for finding in findings:
            _log.warning("%s: %s: %s", finding.phase, finding.what, finding)
        if self._stage == "live":
            self._act([finding for finding in findings if finding.phase == "live"])

    def _judge_early(self) -> None:
        """The first word against it is enough: a guest that is kept from compiling may hang for ever.

        Where there is no word it is asked now and then who still lives, which takes a look at every process of the machine.
        """
        if self._stage == "live" or not self._policy.require_warm or self._asked_to_end is not None:
            return
        if self._news.is_new or self._turned - self._judged_at >= _EARLY_SECONDS:
            self._judged_at = self._turned
            verdict = self._judged()
            if not self._news.lack_their_cause(self._turned) and not self._has_gone(verdict):
                self._refuse_if_not_warm(verdict)

    def _act(self, findings: Sequence[Finding]) -> None:
        if not findings:
            return
        self._metrics.set("aotgaudi_guest_warm", 0)
        first = min(findings, key=lambda one: one.what == "file")  # A cause before what it left.
        if self._policy.on_compile == "drain":
            self._drained = self._drained or f"after ready: {first}"
        elif self._policy.on_compile == "exit":
            self._refuse_if_not_warm(NotWarm((Reason(f"after ready: {first}", first.exit_code),)))

    def _while_starting(self) -> None:
        if self._health.is_good:
            _log.info("the guest serves after %.1f s", self._session.seconds)
            if not self._case.requests:
                self._settle()
                return
            self._session.set_phase("e")
            self._exercise = WarmUpThread(self._session, self._case.requests)
            self._exercise.start()
            self._enter("exercising")
        elif self._session.seconds > self._policy.start_seconds:
            self._session.end()
            raise WrappedServerError(
                f"the guest did not serve within {self._policy.start_seconds:.0f} s, and was ended (--start-timeout)",
                3,
            )

    def _while_exercising(self) -> None:
        assert self._exercise is not None
        if self._exercise.is_alive():
            return
        error = self._exercise.error
        if error is not None:
            _log.warning("the exercise failed: %s", error, extra={"request_id": error.request_id})
            verdict = self._judged()
            causes = verdict.reasons if isinstance(verdict, NotWarm) else ()
            verdict = NotWarm((*causes, Reason(f"its exercise failed: {error}")))
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
        if verdict == ONLY_FILES:  # Everybody has answered, and every byte is read once.
            verdict = self._judged(compares=True)
        if isinstance(verdict, Undecided):
            if time.monotonic() - self._since < SETTLE_SECONDS:
                return
            verdict = NotWarm(
                tuple(Reason(f"it was waited in vain for {what}") for what in verdict.waiting_for)
            )
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
        """Whether it has ended since, which may be what speaks against it: the next turn tells its exit code."""
        return isinstance(verdict, NotWarm) and self._session.child.pid not in self._session.child.living()

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
        present = sum(one.role in roles for one in self._session.account.histories.values())
        states = {"expected": wanted, "present": present, "blind": max(0, wanted - present)}
        loads = sum(sum(one.loads.values()) for one in self._session.account.histories.values())
        for state, number in states.items():
            self._metrics.set("aotgaudi_witness_processes", number, state)
        self._metrics.set(
            "aotgaudi_guest_artifacts", sum(expected.loads.values()) if expected else 0, "expected"
        )
        self._metrics.set("aotgaudi_guest_artifacts", loads, "loaded")

    def _enter(self, stage: Stage) -> None:
        self._stage, self._since = stage, time.monotonic()

    def _ended(self, status: int) -> int:
        """What becomes of a guest that ended by itself, or because it was asked to."""
        self._session.child.end()  # What it left.
        is_asked = self._stage == "live" or self._asked_to_end is not None
        if not is_asked and self._policy.require_warm and (self._news.findings or self._said_all()):
            self._refuse_if_not_warm(self._judged())
        if is_asked or status == 0:
            _log.info("the guest ended with exit code %d", status)
            return status
        raise WrappedServerError(
            f"the guest ended with exit code {status} before it was ready{self._loaded()}", status
        )

    def _said_all(self) -> bool:
        """Whether all of its processes ended in an orderly way, so that it is known what it did."""
        histories = self._session.account.histories.values()
        return all(is_settled(one, self._policy.live_byte) for one in histories)

    def _loaded(self) -> str:
        """How far it came: one whose cache does not load may end for that, and so may one that is not repaired."""
        expected = self._case.expected
        if expected is None or not expected.loads:
            return "; its own messages say why"
        histories = self._session.account.histories.values()
        if not any(one.role in expected.roles for one in histories):
            return (
                ", and none of its processes had a witness (start it without -E, -I or -S, and leave PYTHONPATH alone);"
                " its own messages say why"
            )
        loaded = sum(sum(one.loads.values()) for one in histories)
        wanted = sum(expected.loads.values())
        return f", with {loaded} of {wanted} artifacts loaded; its own messages say why"

    def _answer_reports(self) -> None:
        """One comparison of the files, and one answer, for everybody who has asked since the last turn."""
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
            "compilations": dict(self._metrics.compilations()),
            "findings": [f"{one.phase}: {one.what}: {one}" for one in self._news.findings],
            "processes": [
                {
                    "pid": one.pid,
                    "role": one.role,
                    "is_alive": one.pid in seen.alive,
                    "hooks": dict(one.hooks),
                    "counters": dict(one.counters),
                    "loads": dict(one.loads),
                }
                for one in seen.histories.values()
            ],
            "files": {
                "added": list(seen.files.added),
                "changed": list(seen.files.changed),
                "missing": list(seen.files.missing),
                "is_compared": seen.files.is_compared,
                "is_watched": seen.files.is_watched,
            },
        }


def start(options: RunOptions, admitted: Prepared, signals: Signals) -> int:
    """Runs what was admitted until it ends; returns its exit code. Raises as `launch.run`, but for what `admit` refuses."""
    bundle, why_cold = admitted.bundle, admitted.why_cold
    metrics = Metrics()
    metrics.set("aotgaudi_verify_seconds", time.monotonic() - options.began)
    metrics.set("aotgaudi_guest_residuals", len(bundle.require_capture().residuals))
    metrics.set("aotgaudi_capture_info", 1, *_about(bundle).values())
    reception = _Reception(metrics)
    with (
        HttpServer(options.listen, reception.answers()) as front,
        open_sandbox(
            Path(admitted.here.place.root), needed_bytes=bundle.require_capture().num_bytes
        ) as place,
    ):
        _log.info("http://%s:%d: /ready /live /metrics /report", options.listen.host, front.port)
        if not why_cold:
            _restore(bundle, place, metrics)
        link_model(admitted.found, admitted.launch, place)
        case = _case(bundle, options, why_cold)
        phase, byte = _phase(options.policy, why_cold)
        plan = plan_for(admitted.found, admitted.launch, place, phase, **_sealed(bundle, why_cold))
        signals.hold()
        grace_seconds = options.policy.grace_seconds
        with Session(plan, place, phase=byte, adopts=True, grace_seconds=grace_seconds) as session:
            judge = Supervisor(session, case, options.policy, metrics, signals)
            reception.judge = judge
            return judge.run()


def _restore(bundle: Bundle, place: Sandbox, metrics: Metrics) -> None:
    restored = restore(bundle, place.here)
    metrics.set("aotgaudi_restore_seconds", restored.seconds)
    _log.info(
        "%d files, %d bytes, verified and restored in %.2f s",
        restored.files,
        restored.bytes,
        restored.seconds,
    )


def _sealed(bundle: Bundle, why_cold: str) -> dict[str, Any]:
    receipt = bundle.require_capture()
    left_out = tuple(one.pattern for one in receipt.left_out)
    sealed = {} if why_cold else {file.path: file.digest for file in receipt.files}
    return {"sealed": sealed, "left_out": left_out}


def _phase(policy: Policy, why_cold: str) -> tuple[Phase, str]:
    if why_cold:
        return "cold", "c"
    return ("load", "l") if policy.require_warm else ("measure", "m")


def _case(bundle: Bundle, options: RunOptions, why_cold: str) -> Case:
    receipt = bundle.require_capture()
    return Case(
        expected=None if why_cold else receipt.expected,
        requests=bundle.launch.exercise.requests if options.exercises else (),
        why_cold=why_cold,
        about=_about(bundle),
        residuals=receipt.residuals,
    )


def _about(bundle: Bundle) -> dict[str, str]:
    """The labels of ``aotgaudi_capture_info``, in its order."""
    epoch = "" if bundle.statement is None else str(bundle.statement.epoch)
    return {"launch": bundle.receipt.manifest_id, "bundle": str(bundle.path), "epoch": epoch}


class _Reception:
    """What the front is told before there is a guest, and then by its judge."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.judge: Supervisor | None = None

    def answers(self) -> Answers:
        return Answers(self._not_ready, self._not_live, self._report, self._metrics)

    def _not_ready(self) -> str:
        return "the sealed files are being restored" if self.judge is None else self.judge.not_ready()

    def _not_live(self) -> str:
        return "" if self.judge is None else self.judge.not_live()

    def _report(self) -> Mapping[str, Any]:
        return {"stage": "restoring"} if self.judge is None else self.judge.report()
