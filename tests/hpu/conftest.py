"""The double, installed and examined once for all tests here, and torch, imported once for all forks of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.doctor.hpu.report import DoctorReport
from aotgaudi.document import load_document
from tests.environment import ROOT
from tests.hpu.benches import Bench
from tests.hpu.doctors import Patient, examined
from tests.hpu.forks import import_torch
from tests.parallel import once, run_folder

InstalledDouble = Callable[[str], Path]

FOLDER_VARIABLE = "AOTGAUDI_DOUBLE_FOLDER"
PROFILES = ("1.24.1", "1.19")


@pytest.fixture(scope="session", autouse=True)
def _torch() -> None:
    import_torch()


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> InstalledDouble:
    """Returns where a profile of the double is installed. All are, once a run; what was compiled for them is kept."""
    given = os.environ.get(FOLDER_VARIABLE)
    folder = Path(given).absolute() if given else run_folder(tmp_path_factory) / "double"

    def install() -> None:
        script = ROOT / "tests" / "double" / "install.py"
        for profile in PROFILES:
            subprocess.run([sys.executable, script, folder / profile, "--profile", profile], check=True)

    once(tmp_path_factory, "double", install)
    return folder.joinpath


@pytest.fixture
def newest(double: InstalledDouble) -> Path:
    """The double of the newest release."""
    return double("1.24.1")


@pytest.fixture(scope="session")
def bench(double: InstalledDouble, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """What one build has made."""
    made = Bench(run_folder(tmp_path_factory) / "hpu-bench", double("1.24.1"))
    once(tmp_path_factory, "hpu-bench", made.build)
    return made


@pytest.fixture(scope="session")
def double_memory(double: InstalledDouble, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outcomes of all probes on the newest release without a fault; see `tests.hpu.doctors`."""

    memory = run_folder(tmp_path_factory) / "outcomes"

    def examine() -> None:
        (report,) = examined([Patient(double("1.24.1"), memory=memory)])
        assert isinstance(report, DoctorReport), report
        _report_beside(memory).write_bytes(report.dumps())

    once(tmp_path_factory, memory.name, examine)
    return memory


@pytest.fixture(scope="session")
def newest_report(double_memory: Path) -> DoctorReport:
    """What doctor found there."""
    return load_document(_report_beside(double_memory).read_bytes(), DoctorReport, "report")


def _report_beside(memory: Path) -> Path:
    return memory.with_name("newest-report.json")
