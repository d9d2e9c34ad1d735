"""Process logs as agents write them, for tests: events are numbered from 0 without a gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aotgaudi.bundle.capture_receipt import Expected
from aotgaudi.digest import Digest
from aotgaudi.wrap.events import Event, ProcessLog
from aotgaudi.wrap.file_watch import FileChanges, FileRules
from aotgaudi.wrap.verdict import AnswerDigests, Observation

ROOT = Path("/run/aotgaudi")
MODEL = "cache/model"
SEALED = {MODEL: Digest.of(b"model")}
RULES = FileRules(ROOT, SEALED, ("*.lock",))
HOOKS = {"audit": True, "counters": True}
EXPECTED = Expected(
    loads={"aot:model": 1},
    counters={"num_aot_artifacts_loaded": 1, "num_aot_compiles": 0},
    roles={"APIServer": 1, "EngineCore": 1, "Worker": 1},
    hooks=("audit", "counters"),
    answers=("a" * 64, ""),
)
ANSWERS = tuple(AnswerDigests(one, one) for one in EXPECTED.answers)
CLEAN = FileChanges(is_compared=True, is_watched=True)


def event(kind: str, phase: str = "l", **values: object) -> Event:
    return Event(kind, 0, 0.0, 0, phase, values)


def answer(phase: str) -> Event:
    return event("state", phase, to=phase)


def history(pid: int, *events: Event, num_unreadable: int = 0) -> ProcessLog:
    numbered = (replace(e, number=n, time=pid + n / 100, pid=pid) for n, e in enumerate(events))
    return ProcessLog(pid, tuple(numbered), num_unreadable)


def process(pid: int, role: str, *events: Event) -> ProcessLog:
    """A process that said hello, then `events`, and has answered to ``v``."""
    return history(pid, event("hello", role=role, hooks=HOOKS), *events, answer("v"))


def loads() -> tuple[Event, ...]:
    return (
        event("loaded", what="aot", name="model"),
        event("counters", values={"num_aot_artifacts_loaded": 1}),
    )


def warm(*of_worker: Event) -> Mapping[str, ProcessLog]:
    """What the processes of a warm guest say; `of_worker` is said besides."""
    processes = (
        process(1, "APIServer"),
        process(2, "EngineCore"),
        process(3, "Worker", *loads(), *of_worker),
    )
    return {f"{one.pid}-0.jsonl": one for one in processes}


def seen(processes: Mapping[str, ProcessLog], **changes: object) -> Observation:
    alive = frozenset(one.pid for one in processes.values())
    return replace(Observation(processes, alive, RULES, CLEAN, "v", ANSWERS), **changes)
