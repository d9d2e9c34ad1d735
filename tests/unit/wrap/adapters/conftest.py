from __future__ import annotations

from pathlib import Path

import pytest

from tests.guests_here import Here, vllm_here


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return vllm_here(tmp_path)
