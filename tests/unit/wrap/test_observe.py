"""What an observer makes of events, programs and files as they come."""

from __future__ import annotations

from dataclasses import replace

from aotgaudi.wrap.file_watch import FileChanges
from aotgaudi.wrap.observe import Observer
from aotgaudi.wrap.verdict import Finding
from tests.unit.wrap.logs import event, warm
from tests.unit.wrap.test_supervise import COMPILER, FakeSession

COLD = replace(COMPILER, phase="c")


def test_each_finding_is_told_once_and_counted() -> None:
    session = FakeSession({}, said=[COMPILER, event("trace", "l", name="f")])
    observer = Observer(session)  # type: ignore[arg-type]

    assert [one.what for one in observer.poll()] == ["process"]
    assert observer.poll() == []
    assert observer.counts == {"process": 1}


def test_a_policy_says_which_phases_count() -> None:
    for left_out, num in ((frozenset({"cold"}), 0), (frozenset(), 1)):
        observer = Observer(FakeSession({}, said=[COLD]), left_out)  # type: ignore[arg-type]
        assert len(observer.poll()) == num


def test_what_no_agent_reported_is_found_once() -> None:
    session = FakeSession({})
    session.outside = lambda: (("process 7", Finding("process", "load", "a compiler was run")),)  # type: ignore[method-assign]
    observer = Observer(session)  # type: ignore[arg-type]

    assert [str(one) for one in observer.poll()] == ["a compiler was run"]
    assert observer.poll() == []
    assert observer.history() == (("process 7", Finding("process", "load", "a compiler was run")),)


def test_files_are_findings_of_their_own_and_the_new_ones_are_counted() -> None:
    session = FakeSession({})
    observer = Observer(session)  # type: ignore[arg-type]
    changes = FileChanges(added=("cache/a",), changed=("cache/model",), missing=("cache/b",))
    session.files = lambda: changes  # type: ignore[method-assign]

    assert [(str(one), one.exit_code) for one in observer.poll()] == [
        ("cache/a was added", 3),
        ("cache/model was changed", 4),
        ("cache/b was removed", 3),
    ]
    assert (observer.num_added, observer.poll()) == (1, [])


def test_a_write_that_nobody_watched_after_all_is_in_the_history() -> None:
    """inotify told of the file until it lost events; from then on only the agents' reports are left."""
    probe = event("write", path="/run/aotgaudi/cache/probe")
    session = FakeSession(dict(warm(probe)), said=[probe])
    session.files = lambda: FileChanges(is_watched=True)  # type: ignore[method-assign]
    observer = Observer(session)  # type: ignore[arg-type]

    assert observer.poll() == []
    assert observer.history() == ()
    session.files = lambda: FileChanges(is_watched=False)  # type: ignore[method-assign]
    assert [str(one) for _, one in observer.history()] == ["cache/probe was opened for writing"]


def test_a_server_is_due_when_anything_is_new_or_a_pause_is_over() -> None:
    session = FakeSession({})
    observer = Observer(session)  # type: ignore[arg-type]

    observer.poll()
    assert [observer.is_due(now) for now in (100.0, 100.5, 101.0, 101.5)] == [True, False, True, False]
    session.said = [event("trace", "l", name="f")]
    observer.poll()
    assert observer.is_due(101.6)
