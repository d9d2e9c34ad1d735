"""Samples of the reliability programs; ``python benchmarks/reliability/<name>.py`` runs all of each."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "reliability"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_four_builders_compile_each_unit_once_in_each_round_and_readers_see_nothing_torn() -> None:
    said = run("builders.py", "--builders", "4", "--rounds", "3", "--units", "12")

    assert "36 compiles of 36 units" in said
    assert " 0 torn; 0 bad rounds" in said


def test_builds_killed_at_random_moments_leave_nothing_wrong_and_go_on() -> None:
    said = run("kills.py", "--kills", "25")

    assert "'kills': 25," in said
    assert said.splitlines()[-1].startswith("good")


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_system_call_that_fails_while_publishing_is_one_clean_error_and_the_next_run_finishes() -> None:
    said = run("syscalls.py", "--sample", "12")

    assert " 0 bad" in said.splitlines()[-1]
