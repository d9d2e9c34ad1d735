"""The trial: one compile as a build does it, bounded in time, which leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aotgaudi.doctor.machine import try_to_compile


@pytest.mark.slow
def test_a_step_is_compiled_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    finding = try_to_compile(600.0, 1)

    assert finding.status == "ok", finding
    assert "3 units compiled" in finding.observation
    assert os.listdir(tmp_path) == []


def test_a_trial_that_takes_too_long_is_stopped_and_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    finding = try_to_compile(0.01, 1)

    assert (finding.status, finding.prevents) == ("error", ("build",))
    assert finding.remedy
    assert os.listdir(tmp_path) == []


def test_a_machine_that_cannot_compile_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    finding = try_to_compile(60.0, 1)

    assert finding.status == "error"
    assert "g++ is missing" in finding.observation
    assert "\n" not in finding.observation
