"""``--target FILE``: hpu specs planned, explained, compared and proved without a Gaudi; and what misuse gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
WRITTEN_BY = "aotgaudi doctor --hpu --write-target FILE"


def refused(*arguments: object) -> str:
    """The one line of an error that is exit code 2."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small hpu spec, and a folder for a store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTGAUDI_STORE", str(tmp_path / "store"))
    path = tmp_path / "tiny.toml"
    path.write_text(SPEC_TEXT.replace('"fake"', '"hpu"'), encoding="utf-8")
    return path


def test_there_are_specs_for_gaudi() -> None:
    assert SPECS


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


def test_a_plan_gives_no_time_where_nothing_was_compiled_on_a_gaudi(spec: Path) -> None:
    result = run("build", "plan", spec, "--target", TARGET)

    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("how long that takes is not known")
    assert " s on " not in result.stdout


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


@pytest.mark.parametrize(
    "command", ["build", "build cache", "build bundle", "build plan", "explain", "explain --against x"]
)
def test_without_a_target_it_is_said_what_compiling_and_planning_take(spec: Path, command: str) -> None:
    output = ["-o", "bundle"] if command in ("build", "build bundle") else []

    line = refused(*command.split(), spec, *output)

    assert line.startswith("error: target.backend: 'hpu' cannot be compiled for here: it takes a Gaudi")
    assert f"`{WRITTEN_BY}`" in line
    assert line.endswith("(available here: cpu, fake)")


def test_what_compiles_takes_no_target_and_says_what_it_takes(spec: Path) -> None:
    line = refused("build", "cache", spec, "--target", TARGET)

    assert line.startswith("error: --target: plans, and compiles nothing: it takes a Gaudi; elsewhere")
    assert "--target" not in run("build", "cache", "--help").stdout


def without(component: str) -> str:
    document: dict[str, Any] = json.loads(TARGET.read_bytes())
    del document["toolchain"][component]
    return json.dumps(document)


@pytest.mark.parametrize("command", ["build plan {}", "explain {}", "coverage {}", "diff {} {}"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot be read: No such file"),
        ("", "does not describe a machine"),
        ("[]", "does not describe a machine"),
        ('{"backend": "hpu"}', "does not describe a machine: machine: Field required"),
        ('{"backend": "hpu", "machine": "gaudi2", "more": 1}', "more: Extra inputs are not permitted"),
        (without("kernels"), "error: toolchain.kernels: is missing (written anew by"),
        ('{"backend": "cpu", "machine": "x86_64"}', "--target: is for hpu alone, and that file's is 'cpu'"),
    ],
)
def test_a_file_that_is_no_target_of_a_gaudi_is_refused_in_one_line(
    spec: Path, command: str, text: str | None, expected: str
) -> None:
    if text is not None:
        Path("bad.json").write_text(text, encoding="utf-8")

    assert expected in refused(*command.format(spec, spec).split(), "--target", "bad.json")


@pytest.mark.parametrize("command", ["build plan {}", "explain {}", "coverage {}", "diff {} {}"])
def test_a_target_is_refused_for_a_spec_of_another_device(spec: Path, command: str) -> None:
    spec.write_text(SPEC_TEXT, encoding="utf-8")

    line = refused(*command.format(spec, spec).split(), "--target", TARGET)

    assert line == "error: --target: is for hpu alone, and the spec's target.backend is 'fake' (leave it out)"
