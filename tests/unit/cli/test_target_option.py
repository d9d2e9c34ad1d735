"""``--target FILE``: our hpu specs without a Gaudi; the words are in tests/transcripts/target.txt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.compile.keys import builder_versions
from aotgaudi.digest import Digest
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
from tests.command import Command
from tests.environment import ROOT
from tests.workload import SPEC_TEXT

run = Command()

TARGET = ROOT / "tests" / "golden" / "data" / "hpu.target.json"
SPECS = [
    path for path in sorted((ROOT / "manifests").glob("*.toml")) if load_spec(path).target.backend == "hpu"
]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small hpu spec, and a folder for a store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTGAUDI_STORE", str(tmp_path / "store"))
    path = tmp_path / "tiny.toml"
    path.write_text(SPEC_TEXT.replace('"fake"', '"hpu"'), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_the_specs_for_gaudi_are_planned_explained_compared_and_proved(path: Path, tmp_path: Path) -> None:
    options = ["--target", TARGET, "--json"]
    store = ["--store", tmp_path / "store"]

    plan = json.loads(run("build", "plan", path, *store, *options).stdout)
    explained = json.loads(run("explain", path, *store, *options).stdout)
    compared = json.loads(run("diff", path, path, *options).stdout)
    proved = json.loads(run("coverage", path, *options).stdout)

    assert plan["target"] == json.loads(TARGET.read_bytes())
    assert len(plan["trace"]) == plan["num_programs"] == explained["num_programs"] > 0
    assert len({row["key"] for row in plan["trace"]}) == plan["num_programs"]
    assert plan["estimate_seconds"] is None
    assert [reason["state"] for reason in explained["reasons"]] == ["never built"]
    assert not compared["different"]
    assert proved["closed"]


def test_an_entry_is_explained_with_the_components_of_its_key(spec: Path) -> None:
    result = run("explain", spec, "(decode, 1, 1, 1)", "--target", TARGET)

    assert result.exit_code == 0
    assert "(decode, 1, 1, 1): never built" in result.stdout
    assert "target.toolchain.synapse" in result.stdout
    assert "limits.num_blocks" in result.stdout


def test_what_was_sealed_for_other_libraries_is_explained_by_their_name(spec: Path) -> None:
    manifest = Manifest.of(load_spec(spec))
    target = Target.model_validate_json(TARGET.read_bytes())
    sealed = target.model_copy(update={"toolchain": {**target.toolchain, "kernels": "0" * 64}})
    receipt = Receipt(
        manifest_id=manifest.id,
        target=sealed,
        programs={entry.id: Digest("1" * 64, 1) for entry in manifest.entries},
        units={},
        builder=builder_versions(),
    )
    Path("receipt.json").write_bytes(receipt.dumps())

    result = run("explain", spec, "--against", "receipt.json", "--target", TARGET)

    assert result.exit_code == 0, result.output
    changes = [line.split(":")[0].strip() for line in result.stdout.splitlines() if " -> " in line]
    assert changes == ["target.toolchain.kernels"]


def test_explaining_takes_a_target_as_planning_does(spec: Path) -> None:
    for against in ((), ("--against", "x")):
        line = run.refusal("explain", spec, *against)
        assert line.startswith("error: target.backend: 'hpu' cannot be compiled for here: it takes a Gaudi")
    assert "cannot be read: No such file" in run.refusal("explain", spec, "--target", "none.json")
    spec.write_text(SPEC_TEXT, encoding="utf-8")
    assert "is for hpu alone" in run.refusal("explain", spec, "--target", TARGET)
