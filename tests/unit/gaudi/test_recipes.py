"""The bridge's cache directory: pairs, collecting by key, sets put back read-only, and waiting for what is stored."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.digest import Digest
from aotgaudi.errors import CompileError, CorruptError, SpecError, StoreError
from aotgaudi.gaudi import recipes
from aotgaudi.gaudi.recipes import (
    RecipeName,
    collect,
    find_directories,
    flush_recipes,
    materialise,
    require_one_set,
    scan,
)

LIBRARIES, SYNAPSE = "3f2a", "1.24.1.482.6c1b7a2"
EMPTY = Digest.of(b"")

keys = st.integers(0, 2**64 - 1).map(str)
libraries = st.integers(0, 2**64 - 1).map("{:x}".format)
versions = st.from_regex(r"[0-9]+(\.[0-9a-z]+){2,4}", fullmatch=True)
writers = st.one_of(st.just(""), st.from_regex(r"_[1-9][0-9]{0,6}_[0-9a-f]{12}", fullmatch=True))


def name(key: object, kind: str, *, libs: str = LIBRARIES, version: str = SYNAPSE, writer: str = "") -> str:
    return f"{key}_{libs}_syn{version}.{kind}{writer}"


def put(
    directory: Path, key: object, *, recipe: bytes = b"code", metadata: bytes = b"holder", **rest: str
) -> None:
    (directory / name(key, "recipe", **rest)).write_bytes(recipe)
    (directory / name(key, "metadata", **rest)).write_bytes(metadata)


@given(keys, libraries, versions, st.sampled_from(["recipe", "metadata"]), writers)
def test_a_name_is_read_as_it_is_written(key: str, libs: str, version: str, kind: str, writer: str) -> None:
    text = name(key, kind, libs=libs, version=version, writer=writer)

    parsed = RecipeName.parse(text)

    assert parsed == RecipeName(key, libs, version, kind, writer)
    assert str(parsed) == text.removesuffix(writer)


@pytest.mark.parametrize(
    "text",
    [
        "1_2_syn3",
        "x_2_syn3.recipe",
        "1_2_syn3.recipes",
        "1_2.recipe",
        "temp_1_2_syn3.metadata_7_0123456789ab",
        f"{2**64}_2_syn3.recipe",
        "1_2_syn3.recipe_7_0123456789a",
        "../1_2_syn3.recipe",
        "1_2_syn3/4.recipe",
    ],
)
def test_other_names_are_of_no_recipe(text: str) -> None:
    assert RecipeName.parse(text) is None


def test_a_directory_is_sorted_into_what_can_be_used_and_what_cannot(tmp_path: Path) -> None:
    put(tmp_path, 20)
    put(tmp_path, 3)
    put(tmp_path, 4, metadata=b"")
    put(tmp_path, 5, recipe=b"")
    (tmp_path / name(6, "recipe")).write_bytes(b"code")
    (tmp_path / name(7, "metadata")).write_bytes(b"holder")
    (tmp_path / name(8, "metadata")).write_bytes(b"")
    (tmp_path / name(9, "recipe")).symlink_to("/etc/passwd")
    (tmp_path / f"{name(3, 'x')}_const_tensor_1.data").write_bytes(b"1")
    for leftover in ("eviction.lock", "3_layer.hash_content", f"temp_{name(5, 'metadata')}_7_0123456789ab"):
        (tmp_path / leftover).write_bytes(b"")
    (tmp_path / "README").write_bytes(b"")

    found = scan(tmp_path)

    assert [pair.key for pair in found.pairs] == ["3", "20"]
    assert found.uncached == ("8",)
    assert {int(text.partition("_")[0]) for text in found.broken} == {4, 5, 6, 7, 9}
    assert len(found.constants) == 1
    assert len(found.leftovers) == 3
    assert found.others == ("README",)


def test_of_several_writers_of_a_shared_file_system_the_first_complete_one_counts(tmp_path: Path) -> None:
    (tmp_path / name(1, "recipe", writer="_5_0123456789ab")).write_bytes(b"half")
    put(tmp_path, 1, recipe=b"second", writer="_6_0123456789ab")
    put(tmp_path, 1, recipe=b"third", writer="_7_0123456789ab")

    (pair,) = scan(tmp_path).pairs

    assert pair.recipe.read_bytes() == b"second"
    assert dict(pair.files()) == {name(1, "recipe"): pair.recipe, name(1, "metadata"): pair.metadata}


def test_only_the_keys_asked_for_are_collected_under_plain_names(tmp_path: Path) -> None:
    put(tmp_path, 1, writer="_5_0123456789ab")
    put(tmp_path, 2)
    (tmp_path / name(3, "metadata")).write_bytes(b"")

    collected = collect(tmp_path, ["3", "1"])

    assert sorted(collected.files) == [name(1, "metadata"), name(1, "recipe")]
    assert collected.uncached == ("3",)


def test_without_keys_all_that_is_whole_is_collected(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / name(2, "recipe", writer="_5_0123456789ab")).write_bytes(b"half")
    put(tmp_path, 2, writer="_6_0123456789ab")
    (tmp_path / name(3, "metadata")).write_bytes(b"")

    collected = collect(tmp_path)

    assert sorted(collected.files) == sorted(
        name(key, kind) for key in (1, 2) for kind in ("recipe", "metadata")
    )
    assert collected.uncached == ("3",)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / name(1, "metadata")).unlink(), "recipe 1 has no metadata"),
        (lambda d: (d / name(1, "recipe")).unlink(), "recipe 1 has metadata and no recipe"),
        (lambda d: (d / name(1, "metadata")).write_bytes(b""), "recipe 1 has an empty metadata"),
        (lambda d: (d / name(1, "recipe")).write_bytes(b""), "recipe 1 has an empty recipe"),
        (lambda d: [path.unlink() for path in d.iterdir()], "recipe 1 is not there"),
        (lambda d: (d / "1_2_syn3_const_tensor_4.data").write_bytes(b""), "holds constants"),
        (lambda d: put(d, 2, version="1.25.0.1.x"), "several versions of Synapse: 1.24.1"),
        (lambda d: put(d, 2, libs="aa"), "several versions of libraries: 3f2a, aa"),
    ],
)
def test_what_could_not_be_restored_is_not_collected(tmp_path: Path, damage: object, message: str) -> None:
    put(tmp_path, 1)
    damage(tmp_path)  # type: ignore[operator]

    with pytest.raises(CompileError, match=message):
        collect(tmp_path, ["1"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_what_a_full_disk_did_not_take_is_told_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Whatever it took last: nothing, an empty metadata (as of a graph that compiled to nothing), or half a recipe."""
    (tmp_path / name(2, "metadata")).write_bytes(b"")
    (tmp_path / name(3, "metadata")).write_bytes(b"")
    (tmp_path / name(3, "recipe")).write_bytes(b"ha")
    put(tmp_path, 4)

    def fill(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fill)

    for key in ("1", "2", "3"):
        with pytest.raises(StoreError) as caught:
            collect(tmp_path, ["4", key])
        assert str(caught.value).startswith(
            f"recipe {key} could not be written to {tmp_path}: {os.strerror(code)} (at least 1,048,576 bytes are needed, "
        )
    assert collect(tmp_path, ["4"]).uncached == ()


def test_without_keys_half_a_pair_is_refused(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / name(2, "recipe")).write_bytes(b"code")

    with pytest.raises(CompileError, match="recipe 2 has no metadata"):
        collect(tmp_path)


def test_directories_with_a_rank_are_found(tmp_path: Path) -> None:
    for folder in ("c", "c0", "c12", "cache", "c/3", "c/x", "d1"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)

    found = find_directories(tmp_path / "c")

    assert [str(path.relative_to(tmp_path)) for path in found] == ["c", "c0", "c12", "c/3"]
    assert find_directories(tmp_path / "missing" / "c") == ()


def pair(key: int, libraries: str = LIBRARIES, synapse: str = SYNAPSE) -> dict[str, Digest]:
    return {name(key, kind, libs=libraries, version=synapse): EMPTY for kind in ("recipe", "metadata")}


def test_a_set_is_of_the_version_in_its_names() -> None:
    assert require_one_set({**pair(10), **pair(9)}) == SYNAPSE
    assert require_one_set(()) is None


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
        require_one_set(files)


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
    with pytest.raises(CorruptError, match="not the name of a recipe"):
        materialise({wrong: (Digest.of(b""), Path(os.devnull))}, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="exists already"):
        materialise({}, tmp_path)


def test_the_bridge_is_told_to_where_it_can_be(tmp_path: Path) -> None:
    told: list[bool] = []

    assert flush_recipes(SimpleNamespace(_flush_disk_cache=lambda: told.append(True)), tmp_path)
    assert told == [True]


def test_else_it_waits_until_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_SETTLED_SECONDS", 0.01)
    look, sizes = recipes._sizes, [1, 2, 3, 4]

    def store_and_look(directory: Path) -> dict[str, int]:
        if sizes:  # The bridge stores more between two looks.
            (tmp_path / "1_2_syn3.recipe").write_bytes(bytes(sizes.pop()))
        return look(directory)

    monkeypatch.setattr(recipes, "_sizes", store_and_look)

    assert not flush_recipes(SimpleNamespace(), tmp_path)
    assert not sizes


def test_it_waits_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(recipes, "_LONGEST_SECONDS", 0.1)
    sizes = iter(range(10**9))
    monkeypatch.setattr(recipes, "_sizes", lambda _: {"1_2_syn3.recipe": next(sizes)})

    assert not flush_recipes(SimpleNamespace(), tmp_path)


def test_a_directory_that_was_not_made_has_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_SETTLED_SECONDS", 0.0)

    assert not flush_recipes(SimpleNamespace(), tmp_path / "missing")
