"""Why a run was not warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.errors import SpecError
from aotgaudi.wrap.launch_comparison import Difference
from aotgaudi.wrap.observe import explain_run

SEALED = {"env": {"VLLM_A": "False", "VLLM_B": "1"}, "ModelConfig": {"model": "/run/aotgaudi/model"}}


def write(root: Path, *events: dict[str, Any], pid: int = 7) -> Path:
    folder = root / "events"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"n": number, "t": 1.0, "pid": pid, "phase": "l", **event} for number, event in enumerate(events)]
    (folder / f"{pid}-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


HELLO = {"e": "hello", "role": "Worker"}


def test_what_was_hashed_otherwise_is_named(tmp_path: Path) -> None:
    first = {"e": "factors", "name": "env", "values": {"VLLM_A": True}}
    more = {"e": "factors", "name": "env", "values": {"VLLM_B": 1}}

    found = explain_run(write(tmp_path, HELLO, first, more), SEALED)

    assert found.factors == (Difference("env.VLLM_A", "False", "True"),)
    assert found.num_factors == 2
    assert found.num_processes == 1


def test_what_a_run_did_not_come_to_hash_is_no_difference(tmp_path: Path) -> None:
    found = explain_run(write(tmp_path, HELLO), SEALED)

    assert found.factors == ()


def test_what_must_not_happen_is_listed_once_with_its_frames(tmp_path: Path) -> None:
    refused = {"e": "refused", "argv": ["g++", "x.cpp"], "why": "a compiler", "stack": ["codecache.py:1"]}
    cold = {"e": "compile", "what": "triton", "name": "k", "phase": "c"}

    found = explain_run(write(tmp_path, HELLO, refused, refused, cold), SEALED)

    assert found.deeds == ("Worker 7: refused: g++ x.cpp: a compiler, from codecache.py:1",)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_sandbox_without_a_run_is_refused(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / "events").mkdir()

    with pytest.raises(SpecError, match="the --root of aotgaudi run"):
        explain_run(tmp_path, SEALED)
