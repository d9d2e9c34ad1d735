"""The double, installed once for all tests here, and torch, imported once for all forks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environment import ROOT
from tests.hpu.forks import import_torch

InstalledDouble = Callable[[str], Path]

FOLDER_VARIABLE = "AOTGAUDI_DOUBLE_FOLDER"


@pytest.fixture(scope="session", autouse=True)
def _torch() -> None:
    import_torch()


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> InstalledDouble:
    """Returns where a profile of the double is installed, once a session; what was compiled for it is kept."""
    given = os.environ.get(FOLDER_VARIABLE)
    folder = Path(given) if given else tmp_path_factory.mktemp("double")

    def installed(profile: str) -> Path:
        script, place = ROOT / "tests" / "double" / "install.py", folder / profile
        subprocess.run([sys.executable, str(script), str(place), "--profile", profile], check=True)
        return place

    return functools.cache(installed)


@pytest.fixture
def newest(double: InstalledDouble) -> Path:
    """The double of the newest release."""
    return double("1.24.1")


@pytest.fixture(scope="session")
def double_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the outcomes on the newest release are remembered; see `tests.hpu.doctors`."""
    return tmp_path_factory.mktemp("memory") / "outcomes"
