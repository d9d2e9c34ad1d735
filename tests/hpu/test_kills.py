"""SIGKILL at a random moment of compiling and collecting: the store has all of a unit, or nothing of it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from aotgaudi.compile.jobs import build_once
from aotgaudi.compile.keys import UnitRow, read_rows
from aotgaudi.gaudi.recipes import require_one_set
from aotgaudi.store.fsck import check_store
from tests.hpu.collecting import LAYER, OTHER, Place
from tests.hpu.forks import Fork

pytestmark = [pytest.mark.hpu_double, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_KILLS = 20
SEED = 20_261
SECONDS = 120.0


def building(place: Place, number: int) -> tuple[Path, Fork]:
    """Starts a builder of a unit that no other one builds, which writes down its key first.

    Between the two files of a pair the double waits, so that some kills come there.
    """
    path = place.root / f"key-{number}"

    def build() -> None:
        job = place.job((LAYER if number % 2 else OTHER).replace("[12,8]", f"[{12 + number},8]"))
        path.write_text(job.key, encoding="ascii")
        build_once(job)

    return path, place.started(build, "slow-store")


def ended(process: Fork, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return process.poll() is not None


def check(place: Place, path: Path) -> bool:
    """Whether the unit is recorded; then every file of it is intact, and its recipes are complete pairs."""
    key = path.read_text(encoding="ascii") if path.exists() else ""
    row = read_rows(UnitRow, place.store, (key,)).get(key)
    if row is None:
        return False
    for digest in row.artifact.values():
        place.store.objects.verify(digest)
    recipes = {
        name: digest for name, digest in row.artifact.items() if name not in ("graph.txt", "unit.json")
    }
    assert require_one_set(recipes)
    return True


def test_nothing_is_half_collected(newest: Path, tmp_path: Path) -> None:
    place, began = Place(newest, tmp_path), time.monotonic()
    key, whole = building(place, 0)
    assert ended(whole, SECONDS)
    assert check(place, key)
    seconds, moments = time.monotonic() - began, random.Random(SEED)
    num_whole = 0

    for number in range(1, NUM_KILLS + 1):
        key, process = building(place, number)
        ended(process, moments.uniform(0.0, 1.1) * seconds)
        process.kill()

        num_whole += check(place, key)

    assert num_whole < NUM_KILLS  # Some died before they had published.
    assert check_store(place.store).is_clean
    key, last = building(place, NUM_KILLS)
    assert ended(last, SECONDS)
    assert check(place, key)
