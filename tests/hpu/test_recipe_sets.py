"""A set of recipes that one process compiled, another finds."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from aotgaudi.doctor.hpu.lab import Lab, Outcome, ProbeProcess, start_process
from aotgaudi.errors import TargetError
from aotgaudi.gaudi.counters import Counts, require_found
from aotgaudi.gaudi.recipes import collect, materialise
from aotgaudi.store.store import Store
from tests.hpu.collecting import environment_of
from tests.hpu.forks import start_probe

pytestmark = pytest.mark.hpu_double

ORDER = [1, 2, 3]


def a_lab(folder: Path, directory: Path, **settings: str) -> Lab:
    environment = environment_of(folder, directory, **settings)
    return Lab(directory, environment=environment, start=start_probe)


def keys_of(outcome: Outcome) -> dict[int, list[str]]:
    return {run["graph"]: run["keys"] for run in outcome.values["runs"]}


@pytest.fixture
def built(newest: Path, tmp_path: Path) -> tuple[Path, Outcome]:
    """A directory that one process filled, and what it saw."""
    (tmp_path / "lab").mkdir()
    lab = a_lab(newest, tmp_path / "lab")
    directory = lab.new_directory("built")
    outcome = lab.run("recipes.keys", directory, order=ORDER)
    assert outcome.is_whole, outcome.problem
    return directory, outcome


def through_a_store(directory: Path, keys: list[str], root: Path, target: Path) -> None:
    """Collects recipes into a store, and makes a directory of what that has, once the first is gone."""
    store = Store.open(root)
    files = {name: store.objects.put_file(path) for name, path in collect(directory, keys).files.items()}
    shutil.rmtree(directory)
    materialise({name: (digest, store.objects.path(digest)) for name, digest in files.items()}, target)


def test_a_new_interpreter_finds_each_unit_by_its_key_and_compiles_nothing(
    newest: Path, tmp_path: Path, built: tuple[Path, Outcome]
) -> None:
    def start(arguments: Sequence[str], environment: Mapping[str, str]) -> ProbeProcess:
        """Children get our path: the double is on it only while one starts, so that nothing here imports it."""
        sys.path.insert(0, str(newest))
        try:
            return start_process(arguments, environment)
        finally:
            sys.path.remove(str(newest))

    directory, outcome = built
    keys = [key for found in keys_of(outcome).values() for key in found]
    through_a_store(directory, keys, tmp_path / "store", tmp_path / "restored")
    lab = Lab(tmp_path / "lab", environment=environment_of(newest, tmp_path), start=start)

    again = lab.run("recipes.keys", tmp_path / "restored", order=list(reversed(ORDER)))

    assert again.is_whole, again.problem
    assert keys_of(again) == keys_of(outcome)
    assert set(again.values["total"]["hits"]) == set(keys)
    assert (again.values["total"]["compiled"], again.values["total"]["misses"]) == (0, [])
    assert all(run["error"] == 0.0 for run in again.values["runs"])
    assert sorted(again.values["files"]) == sorted(keys)


def counted(outcome: Outcome) -> Counts:
    total = outcome.values["total"]
    hits, misses = (dict.fromkeys(total[name], 1) for name in ("hits", "misses"))
    return Counts(compiled=total["compiled"], hits=hits, misses=misses)


def test_hits_are_a_units_and_what_was_not_sealed_for_it_is_named(
    newest: Path, tmp_path: Path, built: tuple[Path, Outcome]
) -> None:
    directory, outcome = built
    keys, lab = keys_of(outcome), a_lab(newest, tmp_path / "lab")

    second = counted(lab.run("recipes.keys", directory, order=[2]))

    require_found("graph 2", keys[2], second)
    with pytest.raises(TargetError, match=f"recipe {keys[1][0]} of graph 1 was not found"):
        require_found("graph 1", keys[1], second)
    cold = counted(lab.run("recipes.keys", order=[2]))
    with pytest.raises(TargetError, match=f"recipe {keys[2][0]} of graph 2 was not found"):
        require_found("graph 2", keys[2], cold)


def test_the_bridge_itself_fails_with_recipes_of_another_type_of_device(
    newest: Path, tmp_path: Path, built: tuple[Path, Outcome]
) -> None:
    """K-28: not a miss, which is why they are refused before."""
    lab = a_lab(newest, tmp_path / "lab", AOTGAUDI_DOUBLE_DEVICE="gaudi3")

    outcome = lab.run("recipes.keys", built[0], order=[1])

    assert "synInvalidArgument" in outcome.values["runs"][0]["problem"]
