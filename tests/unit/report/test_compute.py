"""What a report says: the same as the commands that it brings together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.summary import Summary, coverage_document
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.cas import object_path
from aotgaudi.store.store import Store
from tests.environment import ROOT
from tests.specs import spec_of
from tests.unit.compile.conftest import store
from tests.unit.compile.explaining import SECONDS
from tests.unit.report.reports import report_on, report_on_bundle, report_on_store, sealed_bundle
from tests.workload import tiny_spec

__all__ = ["store"]

LLAMA = ROOT / "manifests" / "llama-3.1-8b.gaudi3.toml"
UPSTREAM = {"coverage": "upstream"}


@pytest.mark.parametrize("mode", ["closed", "upstream"])
def test_entries_and_proof_are_those_of_the_manifest(mode: str) -> None:
    spec = load_spec(LLAMA)
    spec = spec.model_copy(update={"bucketing": spec.bucketing.model_copy(update={"coverage": mode})})
    manifest = Manifest.of(spec)

    found = report_on(spec)

    document, proof = found.document, coverage_of(manifest)
    assert document["subject"]["manifest_id"] == manifest.id
    assert (
        document["num_entries"] == len(manifest.entries) == sum(k["num_entries"] for k in document["kinds"])
    )
    assert (document["num_built"], document["built"]) == (None, None)
    assert document["coverage"] == coverage_document(Summary(manifest))
    assert document["coverage"]["closed"] is proof.is_closed is (mode == "closed")
    assert document["num_holes"] == len(document["coverage"]["holes"]) == (12 if mode == "upstream" else 0)
    for heat_map, phase in zip(found.heat_maps, proof.phases, strict=False):
        assert sum(cell.num_steps for cell in heat_map.cells) == phase.num_reachable
        assert sum(cell.num_uncovered for cell in heat_map.cells) == phase.num_uncovered
        kinds = [kind["num_entries"] for kind in document["kinds"] if kind["kind"] == phase.kind]
        assert [sum(bucket.num_entries for bucket in heat_map.buckets)] == kinds
    assert document["notes"] == ["what is built is not known: there is no store"]


def test_a_store_says_what_is_built_and_how_long_it_took(store: Store) -> None:
    found = report_on_store(store)

    built = found.document["built"]
    assert found.document["num_built"] == found.document["num_entries"]
    assert (built["source"], built["num_programs"]) == ("store", 4)
    assert (built["num_units"], built["num_timed"], built["compile_seconds"]) == (4, 4, 4 * SECONDS)
    assert sum(unit["size_bytes"] for unit in built["units"]) == built["size_bytes"]
    assert all(bucket.is_built for heat_map in found.heat_maps for bucket in heat_map.buckets)


def test_a_bundle_has_no_times_and_the_builders_store_has(store: Store, tmp_path: Path) -> None:
    bundle = sealed_bundle(store, tmp_path / "x.bundle")

    alone = report_on_bundle(bundle).document
    beside = report_on_bundle(bundle, store).document

    assert (alone["built"]["source"], alone["built"]["num_units"], alone["built"]["num_timed"]) == (
        *("bundle", 4, 0),
    )
    assert any("no record says how long they took" in note for note in alone["notes"])
    assert (beside["built"]["num_timed"], beside["built"]["compile_seconds"]) == (4, 4 * SECONDS)
    assert alone["kinds"] == beside["kinds"]
    assert alone["num_built"] == alone["num_entries"]
    assert [u["size_bytes"] for u in alone["built"]["units"]] == [
        u["size_bytes"] for u in beside["built"]["units"]
    ]


def test_a_program_that_was_removed_from_a_bundle_is_not_counted_as_built(
    store: Store, tmp_path: Path
) -> None:
    bundle = sealed_bundle(store, tmp_path / "x.bundle")
    lost = bundle.manifest.entries[0]
    object_path(bundle.path, bundle.program_digest(lost.id)).unlink()

    found = report_on_bundle(bundle, store)

    assert found.document["num_built"] < found.document["num_entries"]
    assert any("mend it with" in note for note in found.document["notes"])
    assert any(bucket.is_built is False for heat_map in found.heat_maps for bucket in heat_map.buckets)


@pytest.mark.parametrize(
    "tables",
    [
        {"target": {"backend": "hpu", "execution_mode": "eager"}},
        {
            "bucketing": {"strategy": "unified", "version": "vllm-gaudi@v0.17.1"},
            "scheduler": {"engine": "vllm"},
        },
    ],
    ids=["eager", "unified"],
)
def test_where_no_step_is_proved_there_is_no_heat_map(tables) -> None:
    found = report_on(spec_of(**tables))

    assert found.heat_maps == ()
    assert found.document["num_holes"] == 0


def test_equal_inputs_give_equal_reports_that_are_json() -> None:
    found = report_on(tiny_spec())

    assert found == report_on(tiny_spec())
    assert json.loads(json.dumps(found.document))["schema"] == "aotgaudi.report/1"
