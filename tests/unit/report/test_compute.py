"""What a report says: the same as the commands that it brings together."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import close
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.manifest.coverage import coverage_of, reachable_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.compute import MOST_LISTED, Given, report_of
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


def test_entries_and_proof_are_those_of_the_manifest() -> None:
    manifest = Manifest.of(load_spec(LLAMA))

    found = report_of(Given(path="x", kind="manifest", manifest=manifest, unknown="no store"))

    assert found.subject.manifest_id == manifest.id
    assert found.entries.num_entries == 195 == sum(kind.num_entries for kind in found.entries.kinds)
    assert (found.entries.num_warm, found.entries.num_programs, found.built) == (None, None, None)
    proof = coverage_of(manifest)
    assert found.coverage.is_closed is proof.is_closed is True
    phases = [(p.kind, p.num_reachable, p.num_uncovered) for p in found.coverage.phases]
    assert phases == [(p.kind, p.num_reachable, p.num_uncovered) for p in proof.phases]
    for plane, phase in zip(found.planes, proof.phases, strict=False):
        assert sum(cell.num_steps for cell in plane.cells) == phase.num_reachable
    assert found.notes == ("what is built is not known: no store",)


def test_closing_entries_are_those_that_the_public_table_lacks_with_their_witnesses() -> None:
    spec = load_spec(LLAMA)
    bare = Manifest.of(spec.model_copy(update={"bucketing": spec.bucketing.model_copy(update=UPSTREAM)}))
    additions = close(reachable_of(spec), spec.bucketing.max_padding, BucketTable.from_entries(bare.entries))

    found = report_on(spec)

    assert found.entries.num_closing == found.coverage.num_closing == len(additions) > 0
    assert {(one.entry, one.witness) for one in found.coverage.closing} == {
        (str(addition.entry), addition.witness) for addition in additions
    }
    points = [point for plane in found.planes for point in plane.points if point.origin == "closing"]
    assert sum(point.num_entries for point in points) == len(additions)


def test_holes_are_listed_with_their_witness_and_drawn() -> None:
    spec = load_spec(LLAMA)
    spec = spec.model_copy(update={"bucketing": spec.bucketing.model_copy(update=UPSTREAM)})

    found = report_on(spec)

    assert not found.coverage.is_closed
    assert found.coverage.num_holes == len(found.coverage.holes) == len(found.planes[0].witnesses) > 0
    assert sum(hole.num_uncovered for hole in found.coverage.holes) == found.coverage.phases[0].num_uncovered
    assert found.coverage.smallest in {hole.witness for hole in found.coverage.holes}
    assert found.entries.num_closing == 0


def test_many_holes_are_counted_and_the_first_listed() -> None:
    rows = "\n".join(f"(1, {3000 - 8 * n}, {n})" for n in range(300))
    spec = spec_of(
        config={"max_position_embeddings": 8192},
        limits={"max_num_batched_tokens": 4096, "max_model_len": 8192, "num_blocks": 512},
        bucketing={
            "strategy": "file",
            "coverage": "upstream",
            "version": "vllm-gaudi@091bbad",
            "file_text": f"{rows}\n(2, 1, 512)\n",
        },
    )

    found = report_on(spec)

    assert found.coverage.num_holes > MOST_LISTED == len(found.coverage.holes)


def test_short_queries_are_not_taken_for_closing_entries() -> None:
    found = report_on(spec_of(bucketing={"short_queries": (3,)}))

    origins = {point.origin for point in found.planes[0].points}
    assert "short" in origins
    assert all("3," not in one.entry for one in found.coverage.closing)


def test_a_store_says_what_is_built_and_how_long_it_took(store: Store) -> None:
    found = report_on_store(store)

    assert found.entries.num_warm == found.entries.num_entries
    assert found.built is not None
    assert (found.built.source, found.built.num_units, found.built.num_timed) == ("store", 4, 4)
    assert found.built.compile_seconds == 4 * SECONDS
    assert {piece.piece: piece.compile_seconds for piece in found.built.pieces} == {
        "layer": 2 * SECONDS,
        "head": SECONDS,
        "swap": SECONDS,
    }
    assert sum(unit.size_bytes for unit in found.built.units) == found.built.size_bytes
    assert all(point.is_warm for plane in found.planes for point in plane.points)


def test_an_upgrade_costs_all_that_is_built(store: Store) -> None:
    compiling, tracing = report_on_store(store).upgrades

    for upgrade in (compiling, tracing):
        assert (upgrade.num_entries, upgrade.num_programs) == (5, 4)
        assert (upgrade.num_units, upgrade.num_untimed, upgrade.compile_seconds) == (4, 0, 4 * SECONDS)
    assert (compiling.is_certain, tracing.is_certain) == (True, False)


def test_a_bundle_has_no_times_and_the_builders_store_has(store: Store, tmp_path: Path) -> None:
    bundle = sealed_bundle(store, tmp_path / "x.bundle")

    alone = report_on_bundle(bundle)
    beside = report_on_bundle(bundle, store)

    assert alone.built is not None
    assert beside.built is not None
    assert (alone.built.source, alone.built.num_units, alone.built.num_timed) == ("bundle", 4, 0)
    assert any("no record says how long they took" in note for note in alone.notes)
    assert (beside.built.num_timed, beside.built.compile_seconds) == (4, 4 * SECONDS)
    assert alone.entries == beside.entries
    assert alone.entries.num_warm == alone.entries.num_entries
    assert [u.size_bytes for u in alone.built.units] == [u.size_bytes for u in beside.built.units]


def test_a_program_that_was_removed_from_a_bundle_is_not_counted_as_built(
    store: Store, tmp_path: Path
) -> None:
    bundle = sealed_bundle(store, tmp_path / "x.bundle")
    lost = bundle.manifest.entries[0]
    object_path(bundle.path, bundle.program_digest(lost.id)).unlink()

    found = report_on_bundle(bundle, store)

    assert found.entries.num_warm is not None
    assert found.entries.num_warm < found.entries.num_entries
    assert any("mend it with" in note for note in found.notes)
    assert any(point.is_warm is False for plane in found.planes for point in plane.points)


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
def test_where_no_step_is_proved_there_is_no_plane(tables) -> None:
    found = report_on(spec_of(**tables))

    assert found.planes == ()
    assert found.coverage.num_holes == 0


def test_a_budget_that_is_exceeded_is_a_warning() -> None:
    found = report_on(load_spec(LLAMA), budget_bytes=1 << 30)

    assert found.memory.budget_bytes == 1 << 30
    assert found.memory.total_bytes > 1 << 30
    assert any("the budget is" in text for text in found.warnings)


def test_without_the_sizes_of_the_model_memory_is_not_known() -> None:
    found = report_on(spec_of())

    assert found.memory.unknown is not None
    assert found.memory.total_bytes == 0


def test_equal_inputs_give_equal_reports(store: Store) -> None:
    assert report_on(tiny_spec()) == report_on(tiny_spec())
    assert {type(e) for e in Manifest.of(tiny_spec()).entries} >= {PromptEntry, DecodeEntry}
