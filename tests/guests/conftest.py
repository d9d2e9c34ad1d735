"""One capture of the fake guest for all tests, and runs of it. Paths are short, for sockets lie below them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotgaudi.cli.main import cli
from tests.guests.fake import Fake, make_model
from tests.guests.running import Runs
from tests.ports import free_port

ENVIRON = {
    "PATH": os.defpath,
    "HOME": "/nonexistent",
    "AOTGAUDI_FAKE_GUEST": "1",
    "AOTGAUDI_WITNESS_INTERVAL": "0.05",
    "LANG": "C.UTF-8",
}


@dataclass(frozen=True)
class Captured:
    """A bundle, the launch that it is of, and where that takes place."""

    bundle: Path
    fake: Fake
    root: Path
    store: Path


def build(captured: Captured, *options: str) -> None:
    """``aotgaudi build capture``, as its user would."""
    words = ["build", "capture", "-o", str(captured.bundle), "--root", str(captured.root)]
    words += ["--store", str(captured.store), *options, "--", *captured.fake.words]
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            patch.delenv(name)
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        assert cli.main(words, standalone_mode=False) in (None, 0)


@pytest.fixture(scope="session")
def captured() -> Iterator[Captured]:
    folder = Path(tempfile.mkdtemp(prefix="ag-", dir="/tmp"))
    fake = Fake(make_model(folder / "model"), free_port())
    found = Captured(folder / "fake.bundle", fake, folder / "root", folder / "store")
    build(found, "--exercise", "smoke")
    yield found
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def runs(captured: Captured, tmp_path: Path) -> Runs:
    return Runs(captured.bundle, tmp_path, ENVIRON)


@pytest.fixture
def fake(captured: Captured) -> Fake:
    return Fake(captured.fake.model, free_port())


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ag-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
