"""Sandboxes of tests have short paths, because sockets lie below them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.bundle.conftest import captured, sealed

__all__ = ["captured", "root", "sealed"]


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ag-", dir="/tmp"))
    yield folder / "root"
    shutil.rmtree(folder, ignore_errors=True)
