"""``aotgaudi build cache --check``: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aotgaudi.cli.main import cli
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.store import Store
from tests.workload import SPEC_TEXT, key_of, seed, tiny_spec

STEADY = ("layer a", "head b", "sampler c", "swap d")


def run(folder: Path, *arguments: object) -> Result:
    spec, store = folder / "tiny.toml", folder / "store"
    return CliRunner().invoke(cli, ["build", "cache", str(spec), "--store", str(store), *map(str, arguments)])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a spec, and a store in which all is traced."""
    (tmp_path / "tiny.toml").write_text(SPEC_TEXT, encoding="utf-8")
    return tmp_path


def build(place: Path, *labels: str) -> None:
    manifest = Manifest.of(tiny_spec())
    store = Store.open(place / "store")
    seed(store, manifest.spec, manifest.entries, [labels])
    done = run(place, "-j", "1")
    assert done.exit_code == 0, done.output


def test_a_sample_of_three_is_compiled_again_by_default(place: Path) -> None:
    build(place, *STEADY)

    result = run(place, "--check", "-j", "1")

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("check: 3 units compiled again in ")
    assert result.stdout.endswith(", all to the same bytes\n")


@pytest.mark.parametrize(("sample", "number"), [("1", 1), ("2", 2), ("all", 4), ("99", 4)])
def test_the_size_of_the_sample_is_given(place: Path, sample: str, number: int) -> None:
    build(place, *STEADY)

    result = run(place, "--check", "--sample", sample, "-j", "1", "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (document["same"], document["differences"]) == (True, [])
    assert len(document["units"]) == number
    assert set(document["units"]) <= set(STEADY)


def test_a_difference_is_named_and_the_exit_code_is_4(place: Path) -> None:
    build(place, "layer a", "head b !random")

    result = run(place, "--check", "--sample", "all", "-j", "1")

    unit = key_of("head b !random")[:12]
    lines = result.stderr.splitlines()
    assert result.exit_code == 4
    assert result.stdout == ""
    assert lines[0] == "error: 1 of 2 units compiled again came out otherwise than stored"
    assert lines[1].startswith(f"  head b !random (unit {unit}): unit.bin differs from byte ")
    assert [line.split(" sha256:")[0] for line in lines[2:]] == ["    stored: ", "    rebuilt:"]


def test_a_difference_in_json_is_on_standard_output_and_the_error_beside_it(place: Path) -> None:
    build(place, "head b !random")

    result = run(place, "--check", "-j", "1", "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == 4
    assert document["same"] is False
    assert [row["file"] for row in document["differences"]] == ["unit.bin"]
    assert result.stderr.startswith("error: 1 of 1 units")


def test_an_entry_narrows_what_is_compiled_again(place: Path) -> None:
    build(place, *STEADY)
    entry = Manifest.of(tiny_spec()).entries[0]

    result = run(place, "--check", "--entry", entry.id, "--sample", "all", "-j", "1", "--json")

    assert len(json.loads(result.stdout)["units"]) == 4


def test_nothing_to_compare_with_is_not_warm(place: Path) -> None:
    result = run(place, "--check")

    assert result.exit_code == 3
    assert result.stderr.startswith("error: no unit of this manifest is in the store")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sample", "2"), "give --check, too"),
        (("--check", "--sample", "0"), "'0' is not a sample"),
        (("--check", "--sample", "-1"), "'-1' is not a sample"),
        (("--check", "--sample", "some"), "'some' is not a sample"),
        (("--check", "--sample", "³"), "'³' is not a sample"),
        (("--check", "--receipt", "r.json"), "no --receipt to write"),
    ],
)
def test_misuse_is_a_usage_error(place: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(place, *arguments)

    assert result.exit_code == 2
    assert message in result.stderr
