"""The committed Gaudi manifest is what the command in its header makes."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.command import Command
from tests.environment import ROOT

MANIFESTS = ROOT / "manifests"
NAME = "llama-3.1-8b.gaudi3"


def test_the_command_in_the_header_makes_the_same_spec_and_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = (MANIFESTS / f"{NAME}.toml").read_text(encoding="utf-8")
    program, *words = shlex.split(" ".join(re.findall(r"^#   (.*)$", committed, re.MULTILINE)))
    shutil.copytree(MANIFESTS / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)

    result = Command()(*words, "--output", f"{NAME}.manifest.json")

    assert (program, result.exit_code) == ("aotgaudi", 0), result.output
    made = Path(f"{NAME}.toml").read_text(encoding="utf-8")
    assert made.replace(f"{NAME}.config.json", "configs/llama-3.1-8b.json") == re.sub(
        r"^#.*\n", "", committed, flags=re.MULTILINE
    )
    assert Path(f"{NAME}.manifest.json").read_bytes() == (MANIFESTS / f"{NAME}.manifest.json").read_bytes()
