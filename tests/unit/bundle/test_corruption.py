"""A sample of the corruption matrix; ``python benchmarks/corruption.py`` runs all of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "corruption.py"


@pytest.mark.slow
def test_every_object_damaged_in_every_way_is_found_and_mended() -> None:
    command = [sys.executable, str(SCRIPT), "--entries", "12", "--flips", "2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(
        r"(\d+) objects, 11 ways of damage: (\d+) of (\d+) found by verifying, (\d+) by fsck, 11 of 11 rounds",
        done.stdout,
    )
    assert found is not None, done.stdout
    num_objects, by_verify, cases, by_fsck = map(int, found.groups())
    assert num_objects >= 2 * 12
    assert by_verify == by_fsck == cases == 11 * num_objects
