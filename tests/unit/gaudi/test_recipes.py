"""The bridge's cache directory: what is a pair, what is collected by key, and what is put back read-only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import CompileError
from aotgaudi.gaudi.recipes import RecipeName, collect, find_directories, scan

LIBRARIES, SYNAPSE = "3f2a", "1.24.1.482.6c1b7a2"

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
