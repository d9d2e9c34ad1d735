"""``aotgaudi build plan | cache | bundle | all`` on the fake backend: what they print, and what misuse gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.store import Store
from tests.command import Command
from tests.workload import SPEC_TEXT, seed, tiny_spec

run = Command("build")

LABELS = (("layer a", "head b"), ("layer a", "sampler c"))


class Place:
    """A folder with a spec, and a store in which the spec's programs are traced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = folder / "tiny.toml"
        self.spec.write_text(SPEC_TEXT, encoding="utf-8")
        self.store = folder / "store"
        self.manifest = Manifest.of(tiny_spec())
        self.seed(LABELS)

    def seed(self, labels: Sequence[Sequence[str]]) -> None:
        store = Store.open(self.store)
        seed(store, self.manifest.spec, self.manifest.entries, labels)

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


def test_plan_names_what_is_missing_and_why(place: Place) -> None:
    result = run("plan", place.spec, "--store", place.store, "-j", "2")

    assert result.exit_code == 0, result.output
    assert "  compile  layer a: no artifact with this key in the store" in result.stdout.splitlines()
    assert "on 2 workers" in result.stdout


def test_plan_of_an_empty_store_says_what_is_traced(place: Place, tmp_path: Path) -> None:
    result = run("plan", place.spec, "--store", tmp_path / "empty")

    assert result.exit_code == 0
    assert f"  trace    {place.manifest.entries[0]}: no program with this key in the store" in result.stdout
    assert "and then the units that tracing finds" in result.stdout


def test_plan_json(place: Place) -> None:
    document = run.document("plan", place.spec, "--store", place.store, "-j", "3")

    assert document["target"]["backend"] == "fake"
    assert document["num_entries"] == len(place.manifest.entries)
    assert document["num_jobs"] == 3
    assert sorted(row["label"] for row in document["compile"]) == ["head b", "layer a", "sampler c"]
    assert document["trace"] == []


def test_cache_compiles_once_and_says_so_in_json_on_standard_output_alone(place: Place) -> None:
    first = run("cache", place.spec, "--store", place.store, "-j", "1", "--json")
    second = run("cache", place.spec, "--store", place.store, "-j", "1", "--json")

    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert json.loads(first.stdout)["num_compiled"] == 3
    assert sorted(row["label"] for row in json.loads(first.stdout)["units"]) == [
        "head b",
        "layer a",
        "sampler c",
    ]
    again = json.loads(second.stdout)
    assert [row["phase"] for row in again.pop("phases")] == ["enumerate", "plan"]
    assert again == {
        "num_traced": 0,
        "num_compiled": 0,
        "seconds": 0.0,
        "num_workers": 0,
        "worker_seconds": {},
        "units": [],
    }
    assert second.stderr == ""
    assert "nothing to do" in run("plan", place.spec, "--store", place.store).stdout


def test_a_build_says_where_its_time_went(place: Place) -> None:
    out = ("-o", place.folder / "out", "--store", place.store, "-j", "1")

    document = run.document(place.spec, *out)
    lines = run(place.spec, *out).stdout.splitlines()

    assert [row["phase"] for row in document["phases"]] == ["enumerate", "plan", "run", "seal"]
    assert all(row["begin"] <= row["end"] for row in document["phases"])
    assert document["cache"]["num_workers"] == 1
    assert document["cache"]["worker_seconds"]["trace"] == 0.0
    assert 0 < document["cache"]["worker_seconds"]["compile"] <= document["cache"]["seconds"]
    assert re.fullmatch(r"time: [\d.]+ s: enumerate [\d.]+, plan [\d.]+, seal [\d.]+", lines[-1])


def test_progress_lines_end_with_all_done(place: Place) -> None:
    result = run("cache", place.spec, "--store", place.store, "-j", "1")

    assert result.stderr.splitlines()[-1] == "[3/3] about 0 s left: done"
    assert result.stdout.startswith("cache: 3 units compiled and checked, 0 programs traced")


def test_one_entry_compiles_only_its_units_and_its_receipt_answers_it(place: Place) -> None:
    entry, receipt_path = place.manifest.entries[0], place.folder / "receipt.json"

    result = run(
        "cache", place.spec, "--store", place.store, "--entry", entry.id, "--receipt", receipt_path, "--json"
    )

    assert json.loads(result.stdout)["num_compiled"] == 2
    receipt = load_receipt(receipt_path.read_bytes())
    assert set(receipt.programs) == {entry.id}
    assert receipt.manifest_id == place.manifest.id


def test_failed_units_exit_with_6_each_with_its_log_and_the_others_are_kept(place: Place) -> None:
    place.seed([("layer !fail", "head b")])

    result = run("cache", place.spec, "--store", place.store, "-j", "1")

    assert result.exit_code == 6
    lines = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert lines[:2] == [
        "error: 1 of 2 jobs failed; the others are in the store",
        "  layer !fail: told to fail",
    ]
    assert Path(lines[2].removeprefix("    log: ")).is_file()
    plan = run.document("plan", place.spec, "--store", place.store)
    assert [row["label"] for row in plan["compile"]] == ["layer !fail"]


def test_build_all_gives_manifest_and_bundle_and_does_nothing_twice(place: Place) -> None:
    first = run(place.spec, "--store", place.store, "-j", "1")

    assert first.exit_code == 0, first.output
    assert place.names() == {"tiny.toml", "tiny.manifest.json", "tiny.bundle", "store"}
    times = {path: path.stat().st_mtime_ns for path in place.folder.glob("tiny.*")}
    second = run(place.spec, "--store", place.store, "-j", "1")
    assert second.exit_code == 0
    assert "cache: nothing to do" in second.stdout
    assert {path: path.stat().st_mtime_ns for path in place.folder.glob("tiny.*")} == times
    verified = Command("verify")("tiny.bundle", "--no-target", "--json")
    assert json.loads(verified.stdout)["intact"] is True


def test_build_all_of_a_manifest_gives_the_bundle_of_its_spec(place: Place) -> None:
    run(place.spec, "--store", place.store, "-j", "1")
    index = (place.folder / "tiny.bundle" / "aotgaudi.bundle.json").read_bytes()

    result = run("tiny.manifest.json", "--store", place.store, "-j", "1")

    assert result.exit_code == 0, result.output
    assert place.names() == {"tiny.toml", "tiny.manifest.json", "tiny.bundle", "store"}
    assert (place.folder / "tiny.bundle" / "aotgaudi.bundle.json").read_bytes() == index


def test_a_bundle_of_what_is_not_built_exits_with_3_and_leaves_nothing(place: Place) -> None:
    result = run("bundle", place.spec, "-o", place.folder / "b", "--store", place.store)

    assert result.exit_code == 3
    assert "run: aotgaudi build cache MANIFEST" in result.stderr
    assert place.names() == {"tiny.toml", "store"}


def spec_with(old: str, new: str) -> Callable[[Place], list[object]]:
    def arguments(place: Place) -> list[object]:
        assert old in SPEC_TEXT
        place.spec.write_text(SPEC_TEXT.replace(old, new), encoding="utf-8")
        return ["plan", place.spec]

    return arguments


def file_with(name: str, data: bytes) -> Callable[[Place], list[object]]:
    def arguments(place: Place) -> list[object]:
        (place.folder / name).write_bytes(data)
        return ["plan", place.folder / name]

    return arguments


def edited_manifest(place: Place) -> list[object]:
    run("manifest", place.spec)
    path = place.folder / "tiny.manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"threshold": 32', b'"threshold": 33'))
    return ["cache", path]


def foreign_folder(command: Sequence[str]) -> Callable[[Place], list[object]]:
    def arguments(place: Place) -> list[object]:
        (place.folder / "mine").mkdir()
        (place.folder / "mine" / "thesis.txt").write_text("precious", encoding="utf-8")
        return [*command, place.spec, "-o", place.folder / "mine"]

    return arguments


MISUSES: dict[str, tuple[Callable[[Place], list[Any]], str]] = {
    "unknown key": (
        spec_with("num_blocks = 1", "num_block = 1"),
        "tiny.toml: limits.num_block: unknown key (did you mean 'num_blocks'?)",
    ),
    "wrong type": (
        spec_with("block_size = 16", 'block_size = "16"'),
        "limits.block_size: is '16' (should be a valid integer)",
    ),
    "contradictory limits": (
        spec_with("max_model_len = 16", "max_model_len = 32"),
        "limits.num_blocks: is 1, too few",
    ),
    "no such file": (lambda place: ["plan", "absent.toml"], "absent.toml: cannot be read: No such file"),
    "no such manifest": (lambda place: ["cache", "absent.json"], "absent.json: there is no such file"),
    "a folder": (lambda place: ["cache", place.folder], "is a directory (a spec (.toml) or a manifest"),
    "a folder, for all": (lambda place: [place.folder], "is a directory (a spec (.toml) or a manifest"),
    "a folder, to enumerate": (lambda place: ["manifest", place.folder], "cannot be read: Is a directory"),
    "malformed TOML": (file_with("bad.toml", b"[[["), "bad.toml: TOML syntax: "),
    "binary TOML": (file_with("bad.toml", b"\xff"), "bad.toml: is not UTF-8 text"),
    "malformed JSON": (file_with("bad.json", b"{"), "bad.json: is not JSON"),
    "binary JSON": (file_with("bad.json", b"\xff\xfe"), "bad.json: is not JSON"),
    "JSON of something else": (file_with("bad.json", b"[1]"), "bad.json: is [1] (should be an object)"),
    "manifest edited by hand": (edited_manifest, "a manifest is not edited: change its spec"),
    "backend hpu": (spec_with('backend = "fake"', 'backend = "hpu"'), "'hpu' cannot be compiled for here"),
    "two devices": (
        spec_with("[target]", "[parallel]\ntensor_parallel_size = 2\n[target]"),
        "parallel.tensor_parallel_size: is 2, which the fake backend cannot build (one device, ",
    ),
    "adapters": (
        spec_with("[target]", "[lora]\nmax_loras = 4\n[target]"),
        "lora: asks for 4 adapter slots, which the fake backend cannot build",
    ),
    "quantized": (
        spec_with("[limits]", '[model.quantization]\nmethod = "inc"\n[limits]'),
        "model.quantization: has method 'inc', which the fake backend cannot build",
    ),
    "a quantized checkpoint": (
        spec_with(
            'model_type = "llama",', 'model_type = "llama", quantization_config = { quant_method = "awq" },'
        ),
        "model.config.quantization_config: says that the checkpoint is quantized, which the fake backend cannot build",
    ),
    "backend cuda": (spec_with('backend = "fake"', 'backend = "cuda"'), "(available: cpu, hpu, fake)"),
    "unknown backend": (spec_with('backend = "fake"', 'backend = "tpu"'), "target.backend: is 'tpu'"),
    "unknown entry": (
        lambda place: ["cache", place.spec, "--entry", "zz"],
        "the manifest has no entry 'zz' (it has prompt, ",
    ),
    "bundle over a foreign folder": (foreign_folder(["bundle"]), "neither a bundle nor empty"),
    "all, over a foreign folder": (foreign_folder([]), "neither a bundle nor empty"),
    "bundle over a file": (
        lambda place: ["bundle", place.spec, "-o", place.spec],
        "tiny.toml: it is not a directory",
    ),
    "manifest into no folder": (
        lambda place: ["manifest", place.spec, "-o", place.folder / "no" / "m.json"],
        "m.json: cannot be written: No such file or directory",
    ),
    "manifest over a folder": (
        lambda place: ["manifest", place.spec, "-o", place.store],
        "store: cannot be written: Is a directory",
    ),
    "receipt into no folder": (
        lambda place: ["cache", place.spec, "--receipt", place.folder / "no" / "r.json"],
        "r.json: cannot be written: ",
    ),
    "receipt over a folder": (
        lambda place: ["cache", place.spec, "--receipt", place.store],
        "store: cannot be written: it is a directory",
    ),
    "store is a file": (lambda place: ["cache", place.spec, "--store", place.spec], "is not writable"),
    "store cannot be made": (
        lambda place: ["cache", place.spec, "--store", place.spec / "store"],
        "store is not writable: cannot write to",
    ),
    "store is another folder": (
        lambda place: ["plan", place.spec, "--store", place.folder],
        "is not a store: it has no file 'format'",
    ),
}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("make", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse_is_one_line_and_exit_2_and_nothing_is_written(
    place: Place, make: Callable[[Place], list[object]], message: str
) -> None:
    arguments = make(place)
    store = () if "--store" in arguments or arguments[0] == "manifest" else ("--store", place.store)
    files = {name: data for name, data in snapshot(place.folder).items() if "actions" not in name}

    result = run(*arguments, *store)

    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert {n: d for n, d in snapshot(place.folder).items() if "actions" not in n} == files


def test_entries_are_chosen_as_they_are_printed_and_by_pattern(place: Place) -> None:
    entry = place.manifest.entries[0]
    printed = run("cache", place.spec, "--store", place.store, "-j", "1", "--entry", str(entry), "--json")
    kinds = {kind: len(place.manifest.of_kind(kind)) for kind in ("prompt", "sampler")}
    pattern = run(
        *("cache", place.spec, "--store", place.store, "--entry", f"({entry.kind}, *, *, *)"),
        *("--entry", str(entry), "--receipt", place.folder / "receipt.json", "--json"),
    )

    assert json.loads(printed.stdout)["num_compiled"] == 2
    assert pattern.exit_code == 0, pattern.output
    programs = load_receipt((place.folder / "receipt.json").read_bytes()).programs
    assert len(programs) == kinds["prompt"]


VERBS: dict[str, tuple[list[str], set[str]]] = {
    "build all": (["build", "tiny.toml"], {"manifest", "cache", "bundle"}),
    "build manifest": (["build", "manifest", "tiny.toml"], {"id"}),
    "build plan": (["build", "plan", "tiny.toml"], {"trace", "compile", "estimate_seconds"}),
    "build cache": (["build", "cache", "tiny.toml"], {"num_compiled", "units"}),
    "build bundle": (["build", "bundle", "tiny.toml", "-o", "b"], {"path", "num_units", "object_bytes"}),
    "build image": (["build", "image", "done", "-o", "oci"], {"manifest", "layer"}),
    "explain": (["explain", "tiny.toml"], {"num_entries", "reasons"}),
}


@pytest.mark.parametrize("verb", VERBS)
def test_json_is_one_document_on_standard_output_and_progress_is_beside_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("AOTGAUDI_STORE", str(place.store))
    arguments, keys = VERBS[verb]
    if verb in ("build bundle", "build image"):
        run(place.spec, "-o", "done", "-j", "1")

    result = Command()(*arguments, "--json")

    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert keys <= document.keys()
    assert all(line.startswith("[") for line in result.stderr.splitlines())
    if verb == "build all":
        assert (document["manifest"]["path"], document["bundle"]["path"]) == (
            "tiny.manifest.json",
            "tiny.bundle",
        )
        assert document["manifest"]["id"] == document["bundle"]["manifest_id"] == place.manifest.id
        assert document["bundle"]["num_units"] == document["cache"]["num_compiled"] == 3
