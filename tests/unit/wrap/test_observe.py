"""What an observer makes of events, programs and files as they come, and of a run that has ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.wrap.file_watch import FileChanges
from aotgaudi.wrap.launch_comparison import Difference
from aotgaudi.wrap.observe import Observer, explain_run
from aotgaudi.wrap.verdict import Finding
from tests.unit.wrap.logs import event, history, warm
from tests.unit.wrap.test_supervise import COMPILER, FakeSession

COLD = replace(COMPILER, phase="c")


def test_each_finding_is_told_once_and_counted() -> None:
    session = FakeSession({}, said=[COMPILER, event("trace", "l", name="f")])
    observer = Observer(session)  # type: ignore[arg-type]

    assert [one.what for one in observer.poll()] == ["process"]
    assert observer.poll() == []
    assert observer.counts == {"process": 1}


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ("EngineCore_DP1", "data-parallel rank 1: a compiler was run: g++ x.cpp"),
        ("EngineCore", "a compiler was run: g++ x.cpp"),
    ],
)
def test_a_finding_names_the_data_parallel_rank(of: str, text: str) -> None:
    worker = history(7, event("hello", role="Worker", name="VllmWorker-0", of=of))
    session = FakeSession({"7-0.jsonl": worker}, said=[replace(COMPILER, pid=7)])
    observer = Observer(session)  # type: ignore[arg-type]

    assert [str(one) for one in observer.poll()] == [text]


def test_a_policy_says_which_phases_count() -> None:
    for left_out, num in ((frozenset({"cold"}), 0), (frozenset(), 1)):
        observer = Observer(FakeSession({}, said=[COLD]), left_out)  # type: ignore[arg-type]
        assert len(observer.poll()) == num


def test_what_no_agent_reported_is_found_once() -> None:
    session = FakeSession({})
    session.unreported = lambda: (("process 7", Finding("process", "load", "a compiler was run")),)  # type: ignore[method-assign]
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


SEALED = {"env": {"VLLM_A": "False", "VLLM_B": "1"}, "ModelConfig": {"model": "/run/aotgaudi/model"}}


def write(root: Path, *events: dict[str, Any], pid: int = 7) -> Path:
    folder = root / "events"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"n": number, "t": 1.0, "pid": pid, "phase": "l", **event} for number, event in enumerate(events)]
    (folder / f"{pid}-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


SAID = {"e": "hello", "role": "Worker"}


def test_what_was_hashed_otherwise_is_named(tmp_path: Path) -> None:
    first = {"e": "factors", "name": "env", "values": {"VLLM_A": True}}
    more = {"e": "factors", "name": "env", "values": {"VLLM_B": 1}}

    found = explain_run(write(tmp_path, SAID, first, more), SEALED)

    assert found.factors == (Difference("env.VLLM_A", "False", "True"),)
    assert found.num_factors == 2
    assert found.num_processes == 1


def test_what_a_run_did_not_come_to_hash_is_no_difference(tmp_path: Path) -> None:
    found = explain_run(write(tmp_path, SAID), SEALED)

    assert found.factors == ()


def test_what_must_not_happen_is_listed_once_with_its_frames(tmp_path: Path) -> None:
    refused = {"e": "refused", "argv": ["g++", "x.cpp"], "why": "a compiler", "stack": ["codecache.py:1"]}
    cold = {"e": "compile", "what": "triton", "name": "k", "phase": "c"}

    found = explain_run(write(tmp_path, SAID, refused, refused, cold), SEALED)

    assert found.deeds == ("Worker 7: refused: g++ x.cpp: a compiler, from codecache.py:1",)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_sandbox_without_a_run_is_refused(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / "events").mkdir()

    with pytest.raises(SpecError, match="the --root of aotgaudi run"):
        explain_run(tmp_path, SEALED)
