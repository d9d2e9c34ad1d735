from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aotgaudi.wrap.witness import SITE
from tests.unit.wrap.witness.guest import Guest, make_guest

sys.path.insert(0, str(SITE))  # The tests of single modules import them as a guest does.


@pytest.fixture
def guest(tmp_path: Path) -> Guest:
    return make_guest(tmp_path)
