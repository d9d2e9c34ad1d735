"""What a supervisor makes of a server that ended, of reports, of agents that cannot be read."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import NotWarmError
from aotgaudi.wrap import supervise
from aotgaudi.wrap.adapters.base import Address
from aotgaudi.wrap.client import WrappedServerError
from aotgaudi.wrap.events import Event, ProcessLog
from aotgaudi.wrap.exercise import completion
from aotgaudi.wrap.file_watch import FileChanges
from aotgaudi.wrap.http import Metrics
from aotgaudi.wrap.run_options import Policy
from aotgaudi.wrap.session import Plan
from aotgaudi.wrap.signals import Signals
from aotgaudi.wrap.supervise import Expectation, Supervisor
from aotgaudi.wrap.verdict import Finding, Observation, Warm
from tests.unit.wrap.logs import EXPECTED, HOOKS, RULES, event, history, seen, warm


@dataclass
class Ended:
    """The child of a session that has ended."""

    status: int | None = None
    pid: int = 7
    has_gone: bool = False

    @property
    def tree(self) -> Ended:
        return self

    @property
    def programs(self) -> Ended:
        return self

    is_watching = False

    def living(self) -> frozenset[int]:
        return frozenset() if self.has_gone else frozenset({self.pid})

    def poll(self) -> int | None:
        return self.status

    def end(self) -> int:
        return self.status or 0

    def last_line(self) -> str:
        return ""


@dataclass
class FakeSession:
    """A session of which the events are given; `looks` counts comparisons of files."""

    processes: dict[str, ProcessLog]
    plan: Plan = field(default_factory=lambda: Plan(("guest",), {}, Address(), RULES))
    child: Ended = field(default_factory=Ended)
    phase: str = "v"
    seconds: float = 1.0
    looks: int = 0
    named: str = ""
    judged: int = 0
    said: list[Event] = field(default_factory=list)
    failure: WrappedServerError | None = None

    @property
    def log(self) -> FakeSession:
        return self

    def look(self, *, phase: str | None = None, compares: bool = False) -> Observation:
        self.looks += compares
        self.judged += 1
        return seen(self.processes)

    def set_phase(self, byte: str) -> None:
        self.named = byte

    def warm_up(self, *_: object, **__: object) -> None:
        if self.failure is not None:
            raise self.failure

    def unreported(self) -> tuple[tuple[str, Finding], ...]:
        return ()

    def take_new(self) -> list[Event]:
        said, self.said = self.said, []
        return said

    def files(self) -> FileChanges:
        return FileChanges()

    def end(self) -> int:
        return self.child.end()


def a_supervisor(session: FakeSession, **policy: Any) -> Supervisor:
    chosen = Policy(**{"require_warm": True, **policy})
    case = Expectation(expected=EXPECTED, requests=(completion("x"),))
    return Supervisor(session, case, chosen, Metrics(), Signals())  # type: ignore[arg-type]


COMPILER = event("process", argv=["g++", "x.cpp"], what="compiler")


def test_a_server_that_compiled_and_ended_well_before_it_was_ready_was_not_warm() -> None:
    supervisor = a_supervisor(FakeSession(dict(warm(COMPILER)), child=Ended(0), said=[COMPILER]))

    with pytest.raises(NotWarmError, match="a compiler was run"):
        supervisor._turn()


@pytest.mark.parametrize("stage", ["starting", "exercising"])
def test_a_server_that_is_ending_by_itself_is_told_by_its_exit_code(stage: Any) -> None:
    """Its processes have said goodbye and loaded nothing; a moment later it ends."""
    ended = history(1, event("hello", role="APIServer", hooks=HOOKS), event("bye"))
    others = [
        history(pid, event("hello", role=role), event("bye"))
        for pid, role in ((2, "EngineCore"), (3, "Worker"))
    ]
    session = FakeSession({f"{one.pid}-0.jsonl": one for one in (ended, *others)})
    supervisor = a_supervisor(session)
    supervisor._stage = stage

    assert supervisor._turn() is None
    session.child.status = 7
    with pytest.raises(WrappedServerError) as error:
        supervisor._turn()
    assert error.value.exit_code == 7


def test_a_server_that_did_nothing_and_ended_well_ends_us_well() -> None:
    """It was asked for its help, say."""
    assert a_supervisor(FakeSession({}, child=Ended(0)))._turn() == 0


def test_a_report_is_what_the_last_turn_left_whatever_has_happened_since() -> None:
    supervisor, session = live()
    supervisor._turn()
    before = supervisor.report()

    session.said = [replace(COMPILER, phase="v")]

    assert supervisor.report() == before
    assert (before["verdict"], before["stage"], session.looks) == ("Warm", "live", 0)
    supervisor._turn()
    assert supervisor.report()["verdict"] == "NotWarm"


def test_there_is_a_report_before_the_first_turn() -> None:
    report = a_supervisor(FakeSession({})).report()

    assert (report["stage"], report["verdict"], report["processes"]) == ("starting", "Undecided", [])


def test_who_compares_a_large_capture_is_alive_for_longer() -> None:
    large = {"cache/x": Digest("0" * 64, 100 << 30)}
    session = FakeSession({})
    session.plan = replace(session.plan, rules=replace(RULES, sealed=large))
    supervisor, other = a_supervisor(session), a_supervisor(FakeSession({}))
    for one in (supervisor, other):
        one._turned -= 60

    assert supervisor.not_live() == ""
    assert other.not_live().startswith("no turn for 60")


def test_events_that_cannot_be_read_after_ready_speak_against_it_once() -> None:
    processes = {name: replace(one, num_unreadable=1) for name, one in warm().items()}
    supervisor = a_supervisor(FakeSession(processes))
    supervisor._stage = "live"

    supervisor._turn()
    supervisor._turn()

    assert supervisor._metrics.compilations() == {"live.unknown": 1}
    assert supervisor._metrics._values["aotgaudi_guest_warm"] == {(): 0.0}


def live(**policy: Any) -> tuple[Supervisor, FakeSession]:
    """A server that was proved warm, and serves."""
    session = FakeSession(dict(warm()))
    supervisor = a_supervisor(session, **policy)
    supervisor._become_ready(Warm())
    return supervisor, session


@pytest.mark.parametrize("on_compile", ["report", "exit"])
def test_a_trace_after_ready_is_only_reported(on_compile: str) -> None:
    """Without the warm-up requests, the first one of a kind traces."""
    supervisor, session = live(on_compile=on_compile)
    session.said = [event("trace", "v", name="f")]

    assert supervisor._turn() is None
    assert supervisor._metrics.compilations() == {"live.trace": 1}
    assert supervisor.report()["verdict"] == "Warm"


def test_a_report_after_a_live_compile_says_that_it_is_not_warm() -> None:
    supervisor, session = live()
    session.said = [replace(COMPILER, phase="v")]

    supervisor._turn()

    report = supervisor.report()
    assert report["verdict"] == "NotWarm"
    assert report["reasons"] == ["after ready: a compiler was run: g++ x.cpp"]


def test_a_live_compile_ends_the_server_where_that_is_asked_for() -> None:
    supervisor, session = live(on_compile="exit")
    session.said = [replace(COMPILER, phase="v")]

    with pytest.raises(NotWarmError, match=r"after ready: a compiler was run: g\+\+ x.cpp"):
        supervisor._turn()


def test_a_server_that_says_nothing_is_looked_at_now_and_then_and_each_word_at_once() -> None:
    session = FakeSession({})
    supervisor = a_supervisor(session)

    for _ in range(20):
        supervisor._turn()
    assert session.judged == 1
    session.said = [event("trace", "l", name="f")]
    supervisor._turn()
    assert session.judged == 2
    supervisor._observer._due_at -= 2
    supervisor._turn()
    assert session.judged == 3


STAGES = ["_await_health", "_exercise", "_settle"]


def _go_through(supervisor: Supervisor, stage: str) -> None:
    """From this stage on."""
    for name in STAGES[STAGES.index(stage) :]:
        getattr(supervisor, name)()


@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_ends_while_it_is_judged_is_told_by_its_exit_code(stage: str) -> None:
    """It has no last word where it crashed; a turn may begin before that, and look for the word after it."""
    told = {name: replace(one, events=one.events[:-1]) for name, one in warm().items()}
    session = FakeSession(told, child=Ended(has_gone=True), failure=WrappedServerError("refused"))
    supervisor = a_supervisor(session)

    def look(**_: object) -> Observation:
        session.child.status = 13
        return replace(seen(told), alive=frozenset(), phase="v")

    session.look = look  # type: ignore[method-assign]

    with pytest.raises(supervise._Over) as over:
        _go_through(supervisor, stage)
    assert str(over.value.outcome).startswith("the server ended with exit code 13 before it was ready")


@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_was_asked_to_end_is_not_judged_by_what_it_leaves_undone(stage: str) -> None:
    session = FakeSession(dict(warm(COMPILER)), failure=WrappedServerError("reset"))
    supervisor = a_supervisor(session)
    waits = iter(range(3000))  # More than Python has frames.
    supervisor._signals.wait = lambda _: setattr(  # type: ignore[method-assign]
        session.child, "status", None if next(waits) < 2000 else 143
    )
    supervisor._asked_to_end = time.monotonic()

    with pytest.raises(supervise._Over) as over:
        getattr(supervisor, stage)()
    assert over.value.outcome == 143


def test_a_signal_to_end_counts_also_where_python_drops_its_exception() -> None:
    def interrupted() -> None:
        signals._catch(signal.SIGTERM, None)

    signals = Signals()
    with signals:
        with pytest.raises(SystemExit, match="143"):
            interrupted()  # A finalizer, say: the exception goes no further.
        with pytest.raises(SystemExit, match="143"):
            signals.hold()


@pytest.mark.parametrize("require_warm", [True, False])
def test_a_warm_up_that_fails_is_logged_with_the_id_of_its_request(
    require_warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failure = WrappedServerError("no answer", request_id="aotgaudi-x-0")
    supervisor = a_supervisor(FakeSession(dict(warm()), failure=failure), require_warm=require_warm)

    if require_warm:
        with pytest.raises(NotWarmError, match="a warm-up request failed: no answer"):
            supervisor._exercise()
    else:
        supervisor._exercise()

    (record,) = [
        record for record in caplog.records if record.getMessage().startswith("a warm-up request failed")
    ]
    assert getattr(record, "request_id", None) == "aotgaudi-x-0"


def test_what_made_a_warm_up_fail_is_named_before_it() -> None:
    supervisor = a_supervisor(FakeSession(dict(warm(COMPILER)), failure=WrappedServerError("no answer")))
    supervisor._observer.is_due = lambda _: False  # type: ignore[method-assign]

    with pytest.raises(NotWarmError, match=r"a compiler was run.*1 more"):
        supervisor._exercise()


WRITE = event("write", path="/run/aotgaudi/cache/model")


def test_the_cause_of_a_file_is_waited_for_and_named() -> None:
    session = FakeSession(dict(warm(WRITE)), said=[WRITE])
    supervisor = a_supervisor(session)

    assert supervisor._turn() is None, "only just now"
    session.processes, session.said = dict(warm(WRITE, COMPILER)), [COMPILER]
    with pytest.raises(NotWarmError, match="a compiler was run"):
        supervisor._turn()


def test_a_file_without_a_cause_is_enough_a_moment_later() -> None:
    session = FakeSession(dict(warm(WRITE)), said=[WRITE])
    supervisor = a_supervisor(session)

    assert supervisor._turn() is None
    supervisor._observer._first_file -= 2
    supervisor._observer._due_at -= 2
    with pytest.raises(NotWarmError, match=r"cache/model was opened for writing"):
        supervisor._turn()
