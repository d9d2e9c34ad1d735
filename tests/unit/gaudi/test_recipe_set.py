"""A set of recipes: what belongs together, what a machine must be to use it, and the directory that is made of it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, SpecError, StoreError, TargetError
from aotgaudi.gaudi.recipe_set import RecipeSet, materialise
from aotgaudi.gaudi.recipes import scan

LIBRARIES, SYNAPSE = "3f2a", "1.24.1.482.6c1b7a2"
EMPTY = Digest.of(b"")


def name(key: int, kind: str, libraries: str = LIBRARIES, synapse: str = SYNAPSE) -> str:
    return f"{key}_{libraries}_syn{synapse}.{kind}"


def pair(key: int, libraries: str = LIBRARIES, synapse: str = SYNAPSE) -> dict[str, Digest]:
    return {name(key, kind, libraries, synapse): EMPTY for kind in ("recipe", "metadata")}


def a_set(files: dict[str, Digest]) -> RecipeSet:
    return RecipeSet("gaudi2", SYNAPSE, LIBRARIES, files)


def test_collected_files_are_read_and_say_what_they_were_compiled_for(tmp_path: Path) -> None:
    files = {}
    for key in (10, 9):
        for kind in ("recipe", "metadata"):
            files[name(key, kind)] = tmp_path / f"{key}.{kind}"
            files[name(key, kind)].write_bytes(kind.encode())

    recipes = RecipeSet.of("gaudi3", files)

    assert (recipes.device_type, recipes.synapse, recipes.libraries) == ("gaudi3", SYNAPSE, LIBRARIES)
    assert recipes.keys == ("9", "10")
    assert recipes.files[name(9, "recipe")] == Digest.of(b"recipe")


def test_what_is_hashed_is_what_is_kept(tmp_path: Path) -> None:
    files = {name(1, kind): tmp_path / kind for kind in ("recipe", "metadata")}
    for path in files.values():
        path.write_bytes(path.name.encode())
    kept: list[Path] = []

    def keep(path: Path) -> Digest:
        kept.append(path)
        return Digest.of(b"as kept")

    recipes = RecipeSet.of("gaudi2", files, keep)

    assert kept == list(files.values())
    assert set(recipes.files.values()) == {Digest.of(b"as kept")}


def test_a_set_is_read_as_it_was_recorded() -> None:
    recipes = a_set({**pair(10), **pair(9)})

    assert RecipeSet.from_record(json.loads(json.dumps(recipes.as_record()))) == recipes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_type": "tpu"}, "malformed"),
        ({"synapse": 5}, "malformed"),
        ({"files": ["x"]}, "malformed"),
        ({"files": {name(1, "recipe"): "sha256:0"}}, "not a digest"),
        ({"files": {name(1, "recipe"): str(EMPTY)}}, "recipe 1: its metadata is missing"),
        ({"libraries": "4"}, "another version of libraries"),
    ],
)
def test_a_record_that_is_damaged_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        RecipeSet.from_record({**a_set(pair(1)).as_record(), **change})


def test_a_record_that_lacks_something_is_refused() -> None:
    record = a_set(pair(1)).as_record()
    for missing in record:
        with pytest.raises(CorruptError, match=missing):
            RecipeSet.from_record({one: value for one, value in record.items() if one != missing})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({name(1, "recipe"): EMPTY}, "recipe 1: its metadata is missing"),
        ({name(1, "metadata"): EMPTY}, "recipe 1: its recipe is missing"),
        ({**pair(1), **pair(2, libraries="4")}, "2_4_.*version of libraries"),
        ({**pair(1), **pair(2, synapse="1.19")}, "2_3f2a_syn1.19.*version of synapse"),
        (
            {**pair(1), f"1_{LIBRARIES}_syn{SYNAPSE}_const_tensor_0.data": EMPTY},
            "const_tensor_0.data: is not the name",
        ),
        ({name(1, "recipe") + "_7_0123456789ab": EMPTY}, "is not the name"),
    ],
)
def test_what_could_not_be_restored_is_no_set(files: dict[str, Digest], message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        a_set(files)


@pytest.mark.parametrize(
    ("machine", "component"),
    [
        (("gaudi3", SYNAPSE, LIBRARIES), "target.machine: .* gaudi2, this machine has gaudi3"),
        (("gaudi2", "1.19", LIBRARIES), "target.toolchain.synapse"),
        (("gaudi2", SYNAPSE, "4"), "target.toolchain.libraries"),
    ],
)
def test_another_machine_is_refused_by_what_differs(machine: tuple[str, str, str], component: str) -> None:
    with pytest.raises(TargetError, match=component):
        a_set(pair(1)).require_usable(*machine)


def test_the_same_machine_may_use_it_also_before_its_libraries_are_known() -> None:
    a_set(pair(1)).require_usable("gaudi2", SYNAPSE, LIBRARIES)
    a_set(pair(1)).require_usable("gaudi2", SYNAPSE)


def test_a_set_without_recipes_is_for_every_machine() -> None:
    RecipeSet.of("gaudi2", {}).require_usable("gaudi3", SYNAPSE, LIBRARIES)


def objects(directory: Path, **contents: bytes) -> dict[str, tuple[Digest, Path]]:
    directory.mkdir()
    found = {}
    for kind, content in contents.items():
        (directory / kind).write_bytes(content)
        found[name(1, kind)] = (Digest.of(content), directory / kind)
    return found


def test_what_is_put_back_is_the_same_and_read_only(tmp_path: Path) -> None:
    given_objects = objects(tmp_path / "objects", recipe=b"code" * 1_000_000, metadata=b"holder")

    materialise(given_objects, tmp_path / "cache")

    (pair,) = scan(tmp_path / "cache").pairs
    assert pair.recipe.read_bytes() == b"code" * 1_000_000
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (pair.recipe, pair.metadata)}
    assert modes == {0o444}
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o555


def test_a_flipped_bit_is_found_while_it_is_copied(tmp_path: Path) -> None:
    given_objects = objects(tmp_path / "objects", recipe=b"code")
    (tmp_path / "objects" / "recipe").write_bytes(b"codf")

    with pytest.raises(CorruptError, match="1_3f2a_syn"):
        materialise(given_objects, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_object_that_is_not_there_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    given_objects = objects(tmp_path / "objects", metadata=b"holder", recipe=b"code")
    (tmp_path / "objects" / "recipe").unlink()

    with pytest.raises(StoreError, match=r"read .*objects/recipe"):
        materialise(given_objects, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("wrong", ["../x", "1_2_syn3.recipe_5_0123456789ab", "unit.json", ""])
def test_nothing_but_recipes_is_put_there(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SpecError, match="not the name of a recipe"):
        materialise({wrong: (Digest.of(b""), Path(os.devnull))}, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="exists already"):
        materialise({}, tmp_path)
