"""A server is warm only if everything speaks for it, and losing an event of any process never helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.capture_receipt import Expected
from aotgaudi.wrap.events import Event, ProcessLog
from aotgaudi.wrap.file_watch import FileChanges
from aotgaudi.wrap.verdict import AnswerDigests, NotWarm, Observation, Undecided, Warm, judge
from tests.unit.wrap.logs import CLEAN, EXPECTED, HOOKS, answer, event, history, loads, process, seen, warm

COMPILER = event("process", argv=["g++", "x.cpp"], what="compiler", stack="inductor.py:1")

AGAINST: dict[str, Event] = {
    "a compiler": COMPILER,
    "a compile": event("compile", what="triton", name="kernel"),
    "a generation": event("generate", what="inductor", name="graph"),
    "a compile in the exercise": event("compile", "e", what="dynamo", name="logprobs"),
    "a write to what is sealed": event("write", path="/run/aotgaudi/cache/model"),
    "a load of what is not sealed": event("load", path="/run/aotgaudi/cache/planted.so", sealed=False),
    "a refusal": event("refused", argv=["g++"], why="a compiler"),
    "a word that is not known": event("surprise"),
    "a witness that failed": event("fault", hook="torch.codegen", error="KeyError"),
    "a second load": loads()[0],
    "a counter": event("counters", values={"num_aot_compiles": 1}),
    "a function that Numba compiles after ready": event("compile", "v", what="numba", name="draft"),
    "a trace after ready": event("trace", "v", name="forward"),
}

FOR: dict[str, Event] = {
    "a version question": event("process", argv=["g++", "--version"], what="probe"),
    "a trace in the exercise": event("trace", "e", name="forward"),
    "a function that Numba compiles, which is in no file": event("compile", "e", what="numba", name="draft"),
    "a lock": event("write", path="/run/aotgaudi/cache/model.lock"),
    "a probe": event("write", path="/run/aotgaudi/cache/new"),
    "a file of its own": event("write", path="/run/aotgaudi/tmp/x"),
    "a sealed library": event("load", path="/run/aotgaudi/cache/model", sealed=True),
    "a repair": event("repair", id="vllm.finalize-loading", applied=True),
    "factors": event("factors", name="env", values={}),
}


def test_a_server_is_warm_whatever_a_warm_one_may_do_and_nothing_else() -> None:
    assert judge(seen(warm()), EXPECTED) == Warm()
    assert [name for name, one in FOR.items() if judge(seen(warm(one)), EXPECTED) != Warm()] == []
    verdicts = {name: judge(seen(warm(one)), EXPECTED) for name, one in AGAINST.items()}
    assert {name: one for name, one in verdicts.items() if not isinstance(one, NotWarm)} == {}


def test_the_cause_is_named_first_with_the_process_and_the_frames() -> None:
    verdict = judge(seen(warm(COMPILER, AGAINST["a write to what is sealed"])), EXPECTED)

    assert isinstance(verdict, NotWarm)
    assert verdict.reasons[0].text == "Worker 3: a compiler was run: g++ x.cpp, from inductor.py:1"
    assert (verdict.reasons[0].exit_code, len(verdict.reasons)) == (3, 2)


def test_bytes_that_are_not_sealed_have_an_exit_code_of_their_own() -> None:
    verdict = judge(seen(warm(AGAINST["a load of what is not sealed"])), EXPECTED)

    assert isinstance(verdict, NotWarm)
    assert verdict.reasons[0].exit_code == 4


@pytest.mark.parametrize(
    ("files", "exit_code"),
    [
        (FileChanges(added=("cache/planted.so",), is_compared=True), 4),
        (FileChanges(changed=("cache/model",), is_compared=True), 4),
        (FileChanges(missing=("cache/model",), is_compared=True), 3),
    ],
)
def test_files_alone_are_enough(files: FileChanges, exit_code: int) -> None:
    verdict = judge(seen(warm(), files=files), EXPECTED)

    assert isinstance(verdict, NotWarm)
    assert verdict.reasons[0].exit_code == exit_code


def test_a_file_that_the_server_wrote_is_not_called_planted() -> None:
    files = FileChanges(added=("cache/new",), is_compared=True)

    verdict = judge(seen(warm(FOR["a probe"]), files=files), EXPECTED)

    assert isinstance(verdict, NotWarm)
    assert {reason.exit_code for reason in verdict.reasons} == {3}


def test_where_inotify_sees_nothing_a_probe_may_have_been_more() -> None:
    verdict = judge(seen(warm(FOR["a probe"]), files=FileChanges(is_compared=True)), EXPECTED)

    assert isinstance(verdict, NotWarm)
    assert "cache/new was opened for writing" in verdict.reasons[0].text


@pytest.mark.parametrize(
    ("processes", "waiting"),
    [
        ({}, "an agent in 1 of 1 APIServer processes"),
        ({n: h for n, h in warm().items() if h.role != "Worker"}, "an agent in 1 of 1 Worker processes"),
        (warm() | {"9-0.jsonl": ProcessLog(9)}, "the first event of process 9"),
        (
            warm() | {"9-0.jsonl": history(9, event("hello", role="other"))},
            "other 9 to confirm that its report is complete",
        ),
        (
            warm() | {"9-0.jsonl": process(9, "Worker", event("hooks", hooks={"audit": "waiting"}))},
            "Worker 9 to watch audit",
        ),
    ],
)
def test_what_has_not_been_said_is_waited_for(processes: Mapping[str, ProcessLog], waiting: str) -> None:
    verdict = judge(seen(processes), EXPECTED)

    assert isinstance(verdict, Undecided)
    assert waiting in verdict.waiting_for


def test_files_are_compared_before_anything_is_warm() -> None:
    verdict = judge(seen(warm(), files=replace(CLEAN, is_compared=False)), EXPECTED)

    assert verdict == Undecided(("a comparison of the files",))


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (history(9, event("hello", role="other"), num_unreadable=1), "cannot be read"),
        (history(9, event("bye")), "never reported what it is"),
        (process(9, "Worker", event("hooks", hooks={"audit": False})), "audit could not be watched"),
        (history(9, event("hello", role="Worker", hooks={}), event("bye")), "could not be watched"),
    ],
)
def test_a_process_that_cannot_be_believed_is_not_warm(one: ProcessLog, why: str) -> None:
    verdict = judge(seen(warm() | {"9-0.jsonl": one}), EXPECTED)

    assert isinstance(verdict, NotWarm)
    assert any(why in reason.text for reason in verdict.reasons)


def test_a_process_that_ended_must_have_said_so() -> None:
    helper = event("hello", role="other")
    without, with_bye = history(9, helper), history(9, helper, event("bye"))
    alive = frozenset({1, 2, 3})

    assert isinstance(judge(seen(warm() | {"9": without}, alive=alive), EXPECTED), NotWarm)
    assert judge(seen(warm() | {"9": with_bye}, alive=alive), EXPECTED) == Warm()


def test_what_happens_after_the_answer_is_of_the_next_phase() -> None:
    later = warm()
    worker = later["3-0.jsonl"]
    events = (*worker.events, replace(COMPILER, phase="v", number=len(worker.events), pid=3))

    assert judge(seen(later | {"3-0.jsonl": replace(worker, events=events)}), EXPECTED) == Warm()


@pytest.mark.parametrize(
    ("answers", "is_warm"),
    [
        (("a", ""), True),
        (("a", "f"), True),
        (("b", ""), False),
        (("a",), False),
        (None, True),
    ],
)
def test_answers_are_those_of_the_build(answers: tuple[str, ...] | None, is_warm: bool) -> None:
    """By their text in the proof, else by their status."""
    for at in ("whole", "status"):
        blank = AnswerDigests("x", "x")
        got = answers and tuple(blank._replace(**{at: one * 64}) for one in answers)

        assert isinstance(judge(seen(warm(), answers=got), EXPECTED), Warm if is_warm else NotWarm)


def test_a_load_that_is_missing_is_told_as_a_count() -> None:
    silent = {**warm(), "3-0.jsonl": process(3, "Worker")}

    verdict = judge(seen(silent), EXPECTED)

    assert isinstance(verdict, NotWarm)
    assert "0 of 1 artifacts loaded" in verdict.reasons[0].text


@pytest.mark.parametrize("found", [{}, {"recipe:1": 1}, {"recipe:1": 1, "recipe:2": 1}])
def test_recipes_are_judged_by_what_the_bridge_counts_not_by_which_were_needed(found: dict[str, int]) -> None:
    """Which a start needs follows from the requests that meet in a batch."""
    expected = EXPECTED.model_copy(update={"loads": {**EXPECTED.loads, "recipe:1": 1}})
    told = dict(warm())
    name, log = next((name, log) for name, log in told.items() if log.role == "Worker")
    *before, last = log.events
    more = [event("loaded", what="recipe", name=one.removeprefix("recipe:")) for one in found]
    told[name] = history(log.pid, *before, *more, last)

    assert isinstance(judge(seen(told), expected), Warm)


EVENTS = st.sampled_from(
    [*AGAINST.values(), *FOR.values(), *loads(), event("bye"), answer("e"), answer("v")]
    + [event("hooks", hooks={"audit": what}) for what in (True, False, "waiting")]
)
HELLOS = st.builds(
    lambda role, hooks, phase: event("hello", phase, role=role, hooks=hooks),
    st.sampled_from(["APIServer", "EngineCore", "Worker", "other"]),
    st.sampled_from([HOOKS, {"audit": True}, {"audit": "waiting", "counters": True}]),
    st.sampled_from(["l", "e", "v"]),
)


@st.composite
def processes(draw: st.DrawFn) -> dict[str, ProcessLog]:
    """A warm server's processes, each with a few words more anywhere, and a few processes besides."""
    told = {}
    for name, one in warm().items():
        events = list(one.events)
        for _ in range(draw(st.integers(0, 2))):
            events.insert(draw(st.integers(0, len(events))), draw(EVENTS))
        told[name] = history(one.pid, *events)
    for pid in range(4, 4 + draw(st.integers(0, 2))):
        told[f"{pid}-0.jsonl"] = history(pid, draw(HELLOS), *draw(st.lists(EVENTS, max_size=3)))
    return told


@given(
    told=processes(),
    dead=st.frozensets(st.integers(1, 6)),
    files=st.sampled_from([CLEAN, FileChanges(added=("cache/x",), is_compared=True)]),
    data=st.data(),
)
def test_removing_any_event_never_makes_a_server_warm(
    told: dict[str, ProcessLog], dead: frozenset[int], files: FileChanges, data: st.DataObject
) -> None:
    everything = seen(told, files=files, alive=frozenset(range(1, 9)) - dead)
    before = judge(everything, EXPECTED)
    name = data.draw(st.sampled_from(sorted(told)))
    events = told[name].events
    index = data.draw(st.integers(0, len(events) - 1))
    less = replace(told[name], events=events[:index] + events[index + 1 :])

    after = judge(replace(everything, processes=told | {name: less}), EXPECTED)

    if not isinstance(before, Warm):
        assert not isinstance(after, Warm)


@given(told=processes())
def test_a_verdict_names_something_or_is_warm(told: dict[str, ProcessLog]) -> None:
    verdict = judge(seen(told), Expected())

    assert isinstance(verdict, Warm) or (
        verdict.reasons if isinstance(verdict, NotWarm) else verdict.waiting_for
    )


def replaced(by: ProcessLog | None, *, lives: bool) -> Observation:
    """A process of the server became another program."""
    old = history(9, event("hello", role="other", hooks=HOOKS), event("bye", why="exec"))
    processes = {**warm(), "9-5.jsonl": old, **({} if by is None else {"9-10.jsonl": by})}
    found = seen(processes)
    return found if lives else replace(found, alive=found.alive - {9})


def test_a_process_that_became_another_program_has_ended_or_says_what_it_is() -> None:
    assert judge(replaced(None, lives=False), EXPECTED) == Warm()
    assert judge(replaced(process(9, "other"), lives=True), EXPECTED) == Warm()
    waiting = judge(replaced(None, lives=True), EXPECTED)
    assert waiting == Undecided(("other 9 to report what it has become",))


def test_what_a_process_does_as_another_program_counts() -> None:
    verdict = judge(replaced(process(9, "other", COMPILER), lives=True), EXPECTED)

    assert isinstance(verdict, NotWarm)
