"""One store a run: a unit is compiled once, whatever test of whichever process asks for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aotgaudi.store.store import Store
from tests.parallel import run_folder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """$AOTGAUDI_TEST_STORE keeps compiled units between runs; CI starts from an empty one."""
    kept = os.environ.get("AOTGAUDI_TEST_STORE")
    return Store.open(Path(kept) if kept else run_folder(tmp_path_factory) / "integration-store")
