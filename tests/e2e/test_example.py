"""The example in examples/ does what it says: it builds, verifies and generates."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.harness import Workplace, environment
from tests.environment import ROOT

pytestmark = pytest.mark.slow


def test_the_example_builds_a_bundle_and_generates_from_it(workplace: Workplace) -> None:
    """The store has everything, so nothing is compiled here."""
    example = ROOT / "examples" / "build_and_serve_cpu.py"
    bundle = workplace.folder / "example.bundle"
    arguments = [workplace.spec, workplace.model, bundle, "--store", workplace.store, "--prompt", "the quick"]

    done = subprocess.run(
        [sys.executable, example, *arguments],
        env=environment(workplace.folder / "cache"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "built:     0 units" in done.stdout
    assert "verified:  intact" in done.stdout
    assert "generated: " in done.stdout
    assert "compiled while it ran: 0" in done.stdout
