"""``aotgaudi explain`` of stores that are prepared; more of what it prints is in tests/transcripts/explain.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.cli.explain import change_text, time_text
from aotgaudi.compile.why import Change, Cost
from aotgaudi.errors import counted
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.store import Store
from tests.command import Command
from tests.unit.compile.explaining import built
from tests.workload import FAKE, SPEC_TEXT, tiny_spec

run = Command()

LABELS = (("layer a", "head b"), ("layer a", "sampler c"))
UPGRADED = FAKE.model_copy(update={"toolchain": {**FAKE.toolchain, "torch": "2.14"}})


class Place:
    """A spec, a store in which all of it is built, and a bundle of that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec, self.other = folder / "tiny.toml", folder / "other.toml"
        self.spec.write_text(SPEC_TEXT, encoding="utf-8")
        self.other.write_text(SPEC_TEXT.replace('"float32"', '"bfloat16"'), encoding="utf-8")
        self.store, self.bundle = folder / "store", folder / "tiny.bundle"
        self.manifest = Manifest.of(tiny_spec())
        store = Store.open(self.store)
        built(store, self.manifest.spec, self.manifest.entries, LABELS)
        run("build", "bundle", self.spec, "-o", self.bundle, "--store", self.store)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


@pytest.fixture
def upgraded(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The same, on a machine with another torch."""

    def probe(flags: dict[str, str] | None = None) -> Target:
        return UPGRADED

    monkeypatch.setattr("aotgaudi.backends.fake.probe", probe)
    return place


def test_an_upgrade_is_one_line_with_a_count_the_change_and_the_cost(upgraded: Place) -> None:
    result = run("explain", upgraded.spec, "--store", upgraded.store)

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "5 entries, 4 programs: 0 entries (0 programs) warm",
        "",
        "4 programs (5 entries), e.g. (prompt, 1, 16, 0): not built since these changed",
        "    target.toolchain.torch: none -> 2.14",
        "    3 units to compile again, which took 7.5 s",
    ]


def test_json_holds_the_same_whole(upgraded: Place) -> None:
    document = run.document("explain", upgraded.spec, "--store", upgraded.store)

    (reason,) = document["reasons"]
    assert document["num_warm_entries"] == 0
    assert reason["changes"] == [{"component": "target.toolchain.torch", "old": "none", "new": "2.14"}]
    assert reason["invalidated"] == {
        "num_units": 3,
        "seconds": 7.5,
        "num_units_without_time": 0,
        "certain": True,
    }
    assert (reason["num_programs"], reason["num_entries"], len(reason["keys"])) == (4, 5, 4)


def test_one_entry_that_is_not_warm_gives_the_reason_and_its_components(upgraded: Place) -> None:
    document = run.document("explain", upgraded.spec, "prompt 1 16 0", "--store", upgraded.store)

    assert document["entry"]["state"] == "changed"
    assert document["entry"]["components"]["target.toolchain.torch"] == "2.14"
    assert document["reasons"][0]["changes"][0]["component"] == "target.toolchain.torch"


def test_one_traced_entry_lists_units_that_are_not_compiled(place: Place) -> None:
    store = Store.open(place.store)
    for key in list(store.actions):
        if (store.actions.get(key) or {}).get("label") == "layer a":
            store.actions.discard(key)

    document = run.document("explain", place.spec, "prompt 1 16 0", "--store", place.store)

    assert document["entry"]["state"] == "not compiled"
    assert {unit["label"]: unit["warm"] for unit in document["entry"]["units"]} == {
        "layer a": False,
        "head b": True,
    }


def test_against_a_bundle_on_another_machine_without_a_store(upgraded: Place) -> None:
    lines = run("explain", upgraded.spec, "--against", upgraded.bundle, "--store", "none").stdout.splitlines()

    assert lines[0].endswith("of this manifest")
    assert lines[-2:] == [
        "    target.toolchain.torch: none -> 2.14",
        "    3 units to compile again, how long they took is not on record",
    ]
    assert not (upgraded.folder / "none").exists()


def test_against_a_receipt_of_the_same_manifest(upgraded: Place) -> None:
    receipt = upgraded.bundle / "receipt.json"

    document = run.document("explain", upgraded.spec, "--against", receipt, "--store", upgraded.store)

    assert document["assumed"] == []
    assert document["reasons"][0]["changes"][0]["component"] == "target.toolchain.torch"
    assert document["reasons"][0]["invalidated"]["num_units"] == 3


def test_a_receipt_says_what_traced_it(place: Place) -> None:
    receipt = load_receipt((place.bundle / "receipt.json").read_bytes())

    assert set(receipt.builder) == {"graphs", "transformers"}


def test_against_an_older_receipt_says_that_transformers_is_assumed(place: Place) -> None:
    receipt = load_receipt((place.bundle / "receipt.json").read_bytes())
    older = place.folder / "older.json"
    older.write_bytes(receipt.model_copy(update={"builder": {"graphs": receipt.builder["graphs"]}}).dumps())

    document = run.document("explain", place.spec, "--against", older, "--store", place.store)

    assert document["assumed"] == [
        f"it does not say its transformers: taken to be {receipt.builder['transformers']}"
    ]
    assert document["num_same_entries"] == 5


def test_nothing_is_written_to_the_store(place: Place) -> None:
    def files() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in place.store.rglob("*") if p.is_file()}

    before = files()
    run("explain", place.other, "--store", place.store)
    run("explain", place.other, "--against", place.bundle, "--store", place.store)

    assert files() == before


def test_changes_are_one_short_line() -> None:
    texts = {
        Change("a", None, "1"): "a: (absent) -> 1",
        Change("a", "1", None): "a: 1 -> (absent)",
        Change("a", "x" * 100, "1"): f"a: {'x' * 69}... -> 1",
        Change("target.isa", "avx avx2 fma", "avx avx512f fma"): "target.isa: -avx2 +avx512f",
        Change("a", "line\nline", "1"): "a: line line -> 1",
    }

    assert {change: change_text(change) for change in texts} == texts


def test_times_say_what_is_not_known() -> None:
    texts = {
        Cost(2, 3.0, 0): "which took 3.0 s",
        Cost(2, 3.0, 1): "which took 3.0 s (1 of them not on record)",
        Cost(2, 0.0, 2): "how long they took is not on record",
    }

    assert {cost: time_text(cost) for cost in texts} == texts


def test_counts_have_plurals() -> None:
    counts = [counted(1, "entry"), counted(2, "entry"), counted(1200, "unit")]
    assert counts == ["1 entry", "2 entries", "1,200 units"]
