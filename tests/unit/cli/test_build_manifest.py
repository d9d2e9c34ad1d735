"""Manifests where a transcript (tests/transcripts/build-manifest.txt, coverage.txt) would not do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.cli.options import parse_byte_count
from aotgaudi.manifest.manifest import Manifest, write_manifest
from tests.command import Command
from tests.environment import ROOT
from tests.specs import spec_of

run = Command("build", "manifest")

SPECS = sorted((ROOT / "manifests").glob("*.toml"))


def test_sizes() -> None:
    texts = {"1": 1, "10B": 10, "2KB": 2000, "2 kib": 2048, "1.5GiB": 3 * 2**29, "0.1TB": 10**11}

    assert {text: parse_byte_count(text) for text in texts} == texts


@pytest.mark.process
def test_on_a_terminal_it_is_a_table() -> None:
    script = shutil.which("script")
    if script is None:
        pytest.skip("no `script` here, which makes a terminal")
    command = f"{sys.executable} -m aotgaudi build manifest {SPECS[-1]} --check"

    text = subprocess.run(
        [script, "-qec", command, "/dev/null"], capture_output=True, text=True, check=True
    ).stdout

    assert "│ prompt " in text
    assert "coverage: " in text


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_committed_manifests_are_up_to_date_and_closed(path: Path) -> None:
    result = run(path, "--check", "--json")

    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["uncovered"] == []


def test_there_are_committed_manifests() -> None:
    names = {path.name for path in SPECS}
    assert names >= {"llama-3.1-8b.gaudi3.toml", "smollm2-135m.cpu.toml", "tiny-llama.cpu.toml"}


def test_a_manifest_of_a_closed_spec_that_lacks_entries_is_to_be_enumerated_anew(tmp_path: Path) -> None:
    manifest = Manifest.of(spec_of())
    kept = tuple(entry for entry in manifest.entries if entry.kind != "decode")
    write_manifest(tmp_path / "m.json", Manifest(manifest.spec, kept))

    result = Command("coverage")(tmp_path / "m.json")

    assert result.exit_code == 7
    assert "fix: enumerate it anew: aotgaudi build manifest SPEC" in result.stdout
    assert "  (decode, 2, 1, 16)" in result.stdout
