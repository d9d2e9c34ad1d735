"""SIGKILL at a random moment of compiling and collecting: the store has all of a set of recipes, or nothing of it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.gaudi.recipes import RecipeSet
from aotgaudi.store.fsck import check_store
from aotgaudi.store.store import Store
from tests.hpu.collecting import GRAPHS, environment_of, publish_recipes
from tests.hpu.forks import Fork, start_fork

pytestmark = [pytest.mark.hpu_double, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_KILLS = 50
SEED = 20_261
SECONDS = 60.0


def record_key(number: int) -> str:
    return f"{number:064x}"


def collecting(newest: Path, tmp_path: Path, number: int) -> Fork:
    directory = tmp_path / f"recipes-{number}"
    directory.mkdir()
    # Between the two files of a pair the double waits, so that some kills come there.
    environment = environment_of(newest, directory, AOTGAUDI_DOUBLE_FAULTS="slow-store")
    arguments = (tmp_path / "store", record_key(number))
    return start_fork(lambda: publish_recipes(*arguments), environment, tmp_path / f"output-{number}")


def ended(process: Fork, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return process.poll() is not None


def check(store: Store, record: Mapping[str, Any]) -> None:
    """Every file of the record is there and intact, and they are complete pairs of all graphs."""
    recipes = RecipeSet.from_record(record)
    for digest in recipes.files.values():
        store.objects.verify(digest)
    assert len(recipes.keys) == len(GRAPHS)


def test_nothing_is_half_collected(newest: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    whole = collecting(newest, tmp_path, 0)
    assert ended(whole, SECONDS)
    assert whole.poll() == 0, (tmp_path / "output-0").read_text()
    seconds, moments = time.monotonic() - began, random.Random(SEED)
    store = Store.open(tmp_path / "store")
    num_whole = 0

    for number in range(1, NUM_KILLS + 1):
        process = collecting(newest, tmp_path, number)
        ended(process, moments.uniform(0.0, 1.1) * seconds)
        process.kill()

        record = store.actions.get(record_key(number))
        if record is not None:
            check(store, record)
            num_whole += 1

    assert num_whole < NUM_KILLS  # Some died before they had published.
    assert check_store(store).is_clean
    last = collecting(newest, tmp_path, NUM_KILLS + 1)
    assert ended(last, SECONDS)
    found = store.actions.get(record_key(NUM_KILLS + 1))
    assert found is not None
    check(store, found)
