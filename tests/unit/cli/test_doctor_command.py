"""``aotgaudi doctor``: what it prints and exits with; misuse is in tests/transcripts/doctor.txt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.backends.hpu.process import on_card
from aotgaudi.doctor.hpu.report import Device
from aotgaudi.doctor.machine import MachineFinding
from aotgaudi.machine import Memory
from aotgaudi.manifest.memory import KvCache, MemoryNeed
from tests.command import Command
from tests.specs import spec_toml

run = Command("doctor")

GOOD = MachineFinding("cpu", "ok", "x86_64")
LACKING = MachineFinding("packages", "warning", "uvicorn not installed", "pip install it", ("serve",))
BROKEN = MachineFinding("store", "error", "no room", "another place", ("build",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[MachineFinding]:
    """What is found: a test puts it there."""
    found: list[MachineFinding] = []
    monkeypatch.setattr("aotgaudi.cli.doctor.examine_machine", lambda store: iter(found))
    return found


def test_what_is_found_is_a_line_each_and_a_line_that_sums_it_up(machine: list[MachineFinding]) -> None:
    machine += [GOOD, LACKING]

    result = run()

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "ok       cpu              x86_64",
        "warning  packages         uvicorn not installed",
        "                          right: pip install it",
        "this machine can enumerate, plan and verify, build; it cannot serve (packages)",
    ]


def test_what_is_broken_is_one_line_of_error_and_exit_code_5(
    machine: list[MachineFinding],
) -> None:
    machine += [GOOD, BROKEN]

    result = run()

    assert result.exit_code == 5
    assert result.stderr == "error: store: no room (right: another place)\n"
    assert result.stdout.splitlines()[-1] == (
        "this machine can enumerate, plan and verify, serve; it cannot build (store)"
    )


def test_json_is_one_document_also_where_something_is_broken(machine: list[MachineFinding]) -> None:
    machine += [GOOD, BROKEN]

    result = run("--json")
    document = json.loads(result.stdout)

    assert result.exit_code == 5
    assert (document["can_build"], document["can_serve"]) == (False, True)
    assert document["findings"][1] == {
        "subject": "store",
        "status": "error",
        "observation": "no room",
        "remedy": "another place",
        "prevents": ["build"],
    }


@pytest.mark.process
def test_a_real_machine_is_examined(tmp_path: Path) -> None:
    result = run("--json", "--store", tmp_path / "store")

    document = json.loads(result.stdout)
    assert result.exit_code == (5 if "error" in [f["status"] for f in document["findings"]] else 0)
    subjects = [finding["subject"] for finding in document["findings"]]
    assert subjects == ["packages", "torch", "compiler", "cpu", "memory", "store"]


@pytest.mark.parametrize("option", ["--out", "--write-target"])
def test_a_place_that_cannot_be_written_to_is_named_before_anything_is_examined(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("aotgaudi.cli.doctor.require_bridge", lambda: None)

    result = run("--hpu", option, "/proc/nowhere/x")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot write to /proc/nowhere")


def test_a_spec_that_fits_is_told_with_the_most_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "s.toml").write_text(spec_toml('[target]\nbackend = "hpu"\n'), encoding="utf-8")
    card, cache = Memory(1000 << 20, 900 << 20), KvCache(10 << 20, fixed_bytes=10 << 20)
    need = on_card(MemoryNeed(cache=cache, num_blocks=24, weights_bytes=400 << 20), card)
    monkeypatch.setattr("aotgaudi.cli.doctor.require_bridge", lambda: None)
    monkeypatch.setattr("aotgaudi.cli.doctor.acquire", lambda lab: Device("GAUDI2", "1.24.1", False))
    monkeypatch.setattr("aotgaudi.cli.doctor.fitting", lambda lab, manifest: (need, card))

    result = run("--hpu", "--fit", tmp_path / "s.toml")

    assert result.exit_code == 0
    assert result.stdout == (
        "tiny fits: weights need 400.00 MiB, 24 KV blocks 250.00 MiB and recipes and workspaces 100.00 MiB, 750.00 MiB in"
        " all; 900.00 MiB of 1,000.00 MiB are free; limits.num_blocks may be 39 at most\n"
    )


def test_a_spec_of_another_backend_fits_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(spec_toml(), encoding="utf-8")
    monkeypatch.setattr("aotgaudi.cli.doctor.require_bridge", lambda: None)
    monkeypatch.setattr("aotgaudi.cli.doctor.acquire", lambda lab: Device("GAUDI2", "1.24.1", False))

    result = run("--hpu", "--fit", tmp_path / "s.toml")

    assert result.exit_code == 2
    assert "target.backend: is 'cpu' (--fit is about a card: \"hpu\")" in result.stderr


def test_a_target_of_software_that_is_not_there_is_refused_before_anything_is_examined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("aotgaudi.cli.doctor.require_bridge", lambda: None)

    result = run("--hpu", "--out", tmp_path, "--write-target", tmp_path / "t.json")

    assert result.exit_code == 5
    assert "habana-torch-plugin is not installed here" in result.stderr
