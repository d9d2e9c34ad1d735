"""``aotgaudi build`` with processes that compile on the fake backend; what it prints is in tests/transcripts/build.txt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.cli.build import build_time_line
from aotgaudi.compile.run import BuildOutcome
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.phases import Phase
from aotgaudi.store.store import Store
from tests.command import Command
from tests.workload import SPEC_TEXT, seed, tiny_spec

run = Command("build")


class Place:
    """A folder with a spec, and a store in which the spec's programs are traced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.spec = folder, folder / "store", folder / "tiny.toml"
        self.spec.write_text(SPEC_TEXT, encoding="utf-8")
        manifest = Manifest.of(tiny_spec())
        seed(Store.open(self.store), manifest.spec, manifest.entries, [("layer a", "head b")])

    def names(self) -> set[str]:
        """What lies in the folder."""
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTGAUDI_STORE", "store")
    return Place(tmp_path)


@pytest.mark.process
def test_a_build_says_where_its_time_went_and_a_second_one_writes_nothing(place: Place) -> None:
    document = run.document("tiny.toml", "-j", "1")
    times = {path: path.stat().st_mtime_ns for path in place.folder.glob("tiny.*")}

    again = run.document("tiny.toml", "-j", "1")

    assert [row["phase"] for row in document["phases"]] == ["enumerate", "plan", "run", "seal"]
    assert all(row["begin"] <= row["end"] for row in document["phases"])
    assert (document["cache"]["num_workers"], document["cache"]["num_compiled"]) == (1, 2)
    assert document["cache"]["worker_seconds"]["trace"] == 0.0
    assert 0 < document["cache"]["worker_seconds"]["compile"] <= document["cache"]["seconds"]
    assert document["manifest"]["id"] == document["bundle"]["manifest_id"] == again["manifest"]["id"]
    assert {path: path.stat().st_mtime_ns for path in place.folder.glob("tiny.*")} == times


@pytest.mark.process
def test_a_bundle_that_will_lose_its_model_is_said_to(place: Place) -> None:
    model = place.folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_spec().model.config))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")

    bound = run("tiny.toml", "-j", "1", "--model", model)
    again = run("tiny.toml", "-j", "1", "--model", model)
    lost = run("tiny.toml", "-j", "1")
    after = run("bundle", "tiny.toml", "-o", "tiny.bundle")

    assert "bound to 3 files" in bound.stdout
    assert (bound.stderr + again.stderr).count("note:") == 0
    assert "note: tiny.bundle is bound to its model; its successor is not (--model)" in lost.stderr
    assert "note:" not in after.stderr


@pytest.mark.parametrize("backend", ["cuda", "hpu"])
def test_a_target_that_cannot_be_built_for_here_leaves_no_manifest(place: Place, backend: str) -> None:
    place.spec.write_text(SPEC_TEXT.replace('"fake"', f'"{backend}"'))

    line = run.refusal("tiny.toml")

    assert "target.backend" in line
    assert "fake" not in line
    assert place.names() == {"tiny.toml", "store"}


@pytest.mark.parametrize(
    ("name", "said"), [("bad.toml", "bad.toml: is not UTF-8 text"), ("bad.json", "bad.json: is not JSON")]
)
def test_a_file_that_is_no_text_is_refused_in_one_line(place: Place, name: str, said: str) -> None:
    (place.folder / name).write_bytes(b"\xff\xfe")

    assert said in run.refusal("plan", name)


PHASES = (Phase("enumerate", 0.0, 0.125), Phase("run", 0.5, 10.5), Phase("seal", 10.5, 11.0))


def test_the_run_says_what_its_workers_did() -> None:
    outcome = BuildOutcome(seconds=10.0, num_workers=2, worker_seconds={"trace": 4.0, "compile": 15.0})

    assert build_time_line(PHASES, outcome) == (
        "time: 11.0 s: enumerate 0.1, run 10.0 (2 workers: tracing 4.0, compiling 15.0, idle 1.0), seal 0.5"
    )
