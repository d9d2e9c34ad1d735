"""``aotgaudi doctor --hpu`` as its owner runs it: new interpreters, files, exit codes, and nothing private."""

from __future__ import annotations

import getpass
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from aotgaudi.backends.base import Target
from aotgaudi.backends.hpu.probe import require_whole
from aotgaudi.cli.main import cli
from aotgaudi.doctor.hpu.report import DoctorReport
from aotgaudi.document import load_document
from tests.environment import ROOT
from tests.hpu.forks import double_environment

pytestmark = pytest.mark.hpu_double

SECONDS = 300.0
MANIFEST = ROOT / "manifests" / "llama-3.1-8b.gaudi3.manifest.json"


def started(folder: Path, directory: Path, *arguments: str, **settings: str) -> psutil.Popen:
    (directory / "state").mkdir(exist_ok=True)
    environment = double_environment(folder, AOTGAUDI_DOUBLE_STATE=str(directory / "state"), **settings)
    command = [sys.executable, "-m", "aotgaudi", "doctor", "--hpu", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return psutil.Popen(command, cwd=directory, env=environment, text=True, **pipes)


def doctor(
    folder: Path, directory: Path, *arguments: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    process = started(folder, directory, *arguments, **settings)
    stdout, stderr = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess((), process.returncode, stdout, stderr)


def test_sigterm_ends_an_examination_with_its_probe_which_would_keep_the_card(
    newest: Path, tmp_path: Path
) -> None:
    process = started(newest, tmp_path, "--only", "H-05", AOTGAUDI_DOUBLE_COMPILE_MS="3600000")
    probes: list[psutil.Process] = []
    while not probes and process.poll() is None:
        time.sleep(0.01)
        probes = [child for child in process.children() if is_probe(child)]

    process.terminate()

    assert process.wait(60) == 130
    assert probes
    assert psutil.wait_procs(probes, timeout=60)[1] == []


def is_probe(process: psutil.Process) -> bool:
    """Whether it is no ``hl-smi``, which doctor asks first, and no fork of doctor's own that has still to become one."""
    with suppress(psutil.NoSuchProcess):
        return "aotgaudi.doctor.hpu.bridge" in process.cmdline()
    return False


def test_a_report_is_written_in_two_files_with_nothing_private(newest: Path, tmp_path: Path) -> None:
    private = {"PT_HPU_OF_OURS": "s3cr3t", "HABANA_LOGS": str(tmp_path / "logs"), "RANK": "3"}

    done = doctor(newest, tmp_path, "--only", "H-01,H-02", "--card", "0", "--out", "found", **private)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("this is a double: H-01  versions")
    assert "K-01 confirmed, K-04 confirmed" in done.stdout
    report = load_document((tmp_path / "found" / "doctor-hpu.json").read_bytes(), DoctorReport, "report")
    assert [check.id for check in report.checks] == ["H-01", "H-02"]
    text = (tmp_path / "found" / "doctor-hpu.md").read_text() + report.dumps().decode()
    names = (
        socket.gethostname(),
        rf"\b{getpass.getuser()}\b",
        "s3cr3t",
        "PT_HPU_OF_OURS",
        "0000:[0-9a-f]{2}:",
    )
    for pattern in (re.escape(str(tmp_path)), re.escape(str(Path.home())), *names):
        assert not re.search(pattern, text), pattern
    assert done.stderr == "examined without your RANK: removed: one card, one process\n"


def test_what_does_not_hold_and_is_needed_ends_with_5(newest: Path, tmp_path: Path) -> None:
    done = doctor(newest, tmp_path, "--only", "H-05", AOTGAUDI_DOUBLE_FAULTS="collision")

    assert done.returncode == 5
    assert "K-29: two graphs have the key 12345" in done.stdout
    assert "K-29: what follows: not usable: one graph would be run with the recipe of another" in done.stdout
    assert done.stderr.startswith("error: target: K-29: not found to hold")
    assert done.stderr.endswith("doctor-hpu.md says what was seen\n")


def test_a_bridge_for_another_torch_ends_with_6_and_its_own_words(newest: Path, tmp_path: Path) -> None:
    other = tmp_path / "double"
    shutil.copytree(newest, other)
    (other / "habana_frameworks" / "torch" / "required_version.txt").write_text("1.0.0", encoding="ascii")

    done = doctor(other, tmp_path)

    assert done.returncode == 6
    assert "is not 1.0.0" in done.stderr
    assert not (tmp_path / "doctor-hpu.json").exists()


def test_a_spec_that_does_not_fit_is_told_with_the_figures_of_a_servers_start(
    newest: Path, tmp_path: Path
) -> None:
    text = (ROOT / "manifests" / "tiny-llama.cpu.toml").read_text(encoding="utf-8")
    text = text.replace('"configs', f'"{ROOT}/manifests/configs').replace(
        'backend = "cpu"', 'backend = "hpu"'
    )
    (tmp_path / "large.toml").write_text(text.replace("num_blocks = 24", "num_blocks = 900000"))

    done = doctor(newest, tmp_path, "--fit", "large.toml")

    assert done.returncode == 5, done.stderr
    assert (
        "target: the card has too little memory: weights need 545.25 KiB, 900,000 KV blocks " in done.stderr
    )
    assert " and recipes and workspaces 409.60 MiB, " in done.stderr
    assert " 4.00 GiB of 4.00 GiB are free; limits.num_blocks may be 471," in done.stderr
    assert not (tmp_path / "doctor-hpu.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "H-99"), "there is no check H-99"),
        (("--card", "3"), "--card: is 3 (one of 0, as `hl-smi` counts)"),
    ],
)
def test_what_there_is_not_is_named(
    newest: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = doctor(newest, tmp_path, *arguments)

    assert done.returncode == 2
    assert said in done.stderr


def test_a_machine_writes_its_target_and_another_plans_with_it(newest: Path, tmp_path: Path) -> None:
    """The plan is made without the double."""
    target, store = tmp_path / "target.json", tmp_path / "store"

    done = doctor(
        newest,
        tmp_path,
        *("--only", "H-05,H-06,H-09", "--write-target", str(target)),
        RANK="1",
    )
    planned = CliRunner().invoke(
        cli, ["build", "plan", str(MANIFEST), "--target", str(target), "--store", str(store), "--json"]
    )

    assert done.returncode == 0, done.stderr
    require_whole(Target.model_validate_json(target.read_bytes()))
    assert planned.exit_code == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["target"]["toolchain"]["habana-torch-plugin"].endswith("double")
    assert plan["target"]["flags"]["hpu.key_mode"] == "stable"
    assert "env.RANK" not in plan["target"]["flags"]
    assert str(newest) not in target.read_text()
    assert plan["num_programs"] == len(plan["trace"]) > 0
