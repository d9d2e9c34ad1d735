"""Commands are quick because they import what they need, and no more: each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import ROOT

pytestmark = pytest.mark.process

HEAVY = {"torch", "numpy", "rich", "transformers", "fastapi"}
SPEC = str(ROOT / "manifests" / "tiny-llama.cpu.toml")


@pytest.mark.parametrize(
    ("words", "printed", "needless"),
    [
        ("--help", "build", {"pydantic", "aotgaudi.cli.build_manifest"}),
        ("build --help", "build", {"pydantic", "aotgaudi.cli.build_manifest"}),
        ("build -h", "build", {"pydantic", "aotgaudi.cli.build_manifest"}),
        (f"coverage {SPEC}", ": closed", set()),
        (
            f"build manifest {SPEC} -o m.json",
            "entries for",
            {"aotgaudi.from_vllm", "aotgaudi.manifest.schema"},
        ),
    ],
)
def test_a_command_imports_nothing_that_it_does_not_need(
    words: str, printed: str, needless: set[str], tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom aotgaudi.cli.main import cli\n"
        f"try: cli.main({words.split()!r}, prog_name='aotgaudi')\n"
        "except SystemExit: pass\n"
        f"sys.exit(' '.join({HEAVY | needless!r} & sys.modules.keys()))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.stderr.strip() == ""
    assert printed in done.stdout


def test_completion_works_as_the_shell_calls_it_and_imports_no_command() -> None:
    code = (
        "import atexit, sys\n"
        "shown = lambda: print(*sorted(m for m in sys.modules if m.startswith('aotgaudi.cli.')), file=sys.stderr)\n"
        "atexit.register(shown)\n"
        "from aotgaudi.cli.main import main\nmain()"
    )
    asked = {"_AOTGAUDI_COMPLETE": "bash_complete", "COMP_WORDS": "aotgaudi ex", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )

    assert done.stdout == "plain,explain\n"
    assert done.stderr == "aotgaudi.cli.main aotgaudi.cli.verbs\n"
