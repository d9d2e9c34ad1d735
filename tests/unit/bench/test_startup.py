"""What is made of measured starts, and of those that fail; the starts themselves are in tests/e2e/test_startup.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotgaudi.bench.startup import Spread, Start, StartFailedError, Startup, Subject, phases_in, run_floor
from aotgaudi.cli.bench import startup_document, startup_lines
from aotgaudi.cli.main import cli
from aotgaudi.phases import Phase

FOUND = Startup(
    floor=Spread((1.0, 1.2, 0.8)),
    starts=(
        Start(2.0, (Phase("process", 0.0, 0.5), Phase("verify", 0.5, 1.0))),
        Start(1.5, (Phase("process", 0.0, 0.25), Phase("verify", 0.25, 0.5))),
        Start(1.0, (Phase("verify", 0.75, 0.875), Phase("process", 0.0, 0.25))),
    ),
)


def test_phases_are_read_from_metrics_and_only_whole_ones() -> None:
    text = (
        'aotgaudi_start_phase_begin_seconds{phase="verify"} 0.5\n'
        'aotgaudi_start_phase_end_seconds{phase="verify"} 0.75\n'
        'aotgaudi_start_phase_begin_seconds{phase="half"} 0.5\n'
        'aotgaudi_other{phase="verify"} 9\n'
    )

    assert phases_in(text) == (Phase("verify", 0.5, 0.75),)
    assert phases_in("") == ()


def test_each_phase_has_the_median_of_its_begin_end_and_length() -> None:
    document = startup_document(FOUND)

    assert [row["phase"] for row in document["phases"]] == ["process", "verify"]
    verify = document["phases"][1]
    assert (verify["begin"]["median"], verify["end"]["median"], verify["seconds"]["samples"]) == (
        0.5,
        0.875,
        [0.5, 0.25, 0.125],
    )
    assert document["ready"]["median"] == 1.5
    assert document["ready_to_floor"] == 1.5
    assert document["runs"] == 3


def test_the_table_has_a_row_a_phase_and_the_floor_beside_ready() -> None:
    lines = startup_lines(FOUND)

    assert [line.split()[0] for line in lines] == ["phase", "process", "verify", "ready", "floor", "ready"]
    assert lines[2].split()[1:6] == ["0.50", "0.88", "0.25", "(0.12", "to"]
    assert lines[4].split()[1:] == ["1.00", "(0.80", "to", "1.20)"]
    assert "ready is 1.50 x the floor; 3 starts of each" in lines[5]


def test_a_phase_that_not_every_start_has_is_left_out() -> None:
    starts = (*FOUND.starts, Start(1.0, (Phase("process", 0.0, 0.1),)))

    assert list(Startup(FOUND.floor, starts).phases) == ["process"]


def test_a_floor_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")

    with pytest.raises(StartFailedError, match="the floor ended with 1: Exception: "):
        run_floor(Subject(tmp_path, tmp_path, dict(os.environ)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "here"], "Missing option '--bundle'"),
        (["--bundle", "here", "--model", "here", "--runs", "0"], "0 is not in the range x>=1"),
    ],
)
def test_misuse_is_one_sentence(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "startup", *arguments])

    assert result.exit_code == 2
    assert said in result.stderr
