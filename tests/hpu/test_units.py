"""Units of the HPU backend on the double: what compiling and proving refuse, what they find, and which card they use."""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from aotgaudi.compile.cards import CardPool
from aotgaudi.compile.jobs import run_compile
from aotgaudi.compile.keys import ProofRow, UnitRow
from aotgaudi.compile.workers import Done
from aotgaudi.errors import AotGaudiError, CardError, StoreError, TargetError
from aotgaudi.gaudi.recipes import RecipeName
from aotgaudi.store.scratch import locked_directory
from tests.hpu.collecting import LABEL, LAYER, NOT_LOWERED, ONE_OPERATOR, OTHER, SECONDS, Place
from tests.hpu.conftest import InstalledDouble

pytestmark = [pytest.mark.hpu_double, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong-numbers", "differs from eager"),
        ("", "not in a cluster: ['aten.addcmul"),
        ("const-tensor", "holds constants"),
        ("collision", LABEL),
        ("busy-card", "busy: another process has it"),
    ],
)
def test_a_unit_is_never_recorded_where_the_bridge_does_otherwise_than_it_must(
    newest: Path, tmp_path: Path, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.backends.hpu.card._RETRY_SECONDS", 60.0)

    last = LAYER if fault else NOT_LOWERED
    found = Place(newest, tmp_path).compiled(OTHER, last, fault=fault)

    assert isinstance(found, AotGaudiError)
    assert found.exit_code == 6
    assert message in str(found)


def test_a_disk_that_is_full_when_the_bridge_stores_is_told_as_that(newest: Path, tmp_path: Path) -> None:
    """The bridge writes in its own thread, and only its log says that it could not; here each file may have 16 bytes."""
    place = Place(newest, tmp_path)

    def compile_on_a_full_disk() -> UnitRow:
        job, (soft, hard) = place.job(), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
        try:
            return run_compile(job)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    found = place.in_fork(compile_on_a_full_disk)

    assert isinstance(found, StoreError), found
    assert " could not be written to " in str(found)
    assert "bytes are needed" in str(found)
    assert "killed" not in str(found)


def test_a_card_that_does_not_answer_is_given_up_by_name(
    newest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.backends.hpu.card._ANSWER_SECONDS", 0.5)
    place = Place(newest, tmp_path)

    def serve() -> None:
        from aotgaudi.backends.hpu.runtime import HpuRuntime

        HpuRuntime(place.target()).restore(())

    compiled = place.compiled(fault="hang", HLS_MODULE_ID="1")
    served = place.in_fork(serve, "hang", HLS_MODULE_ID="1")

    assert [type(compiled), type(served)] == [CardError, TargetError]
    for error in (compiled, served):
        assert "the card with module id 1 does not answer" in str(error)


def test_bridges_whose_keys_count_modules_are_refused(double: InstalledDouble, tmp_path: Path) -> None:
    refused = Place(double("1.19"), tmp_path).compiled()

    assert isinstance(refused, AotGaudiError)
    assert refused.exit_code == 6
    assert "do not repeat within a process" in str(refused)


@pytest.mark.parametrize("fault", ["no-flush", "no-recipe-metric"])
def test_what_a_bridge_lacks_takes_another_way_to_the_same_recipes(
    newest: Path, tmp_path: Path, fault: str
) -> None:
    place = Place(newest, tmp_path / "lacking")
    whole, row = Place(newest, tmp_path / "whole").compiled(), place.compiled(fault=fault)
    assert isinstance(whole, UnitRow)
    assert isinstance(row, UnitRow), row

    proof = place.proved(row, fault=fault)

    assert row.artifact.keys() == whole.artifact.keys()
    assert isinstance(proof, ProofRow), proof
    assert (proof.num_rounds, proof.recipes) == (1, {})


def test_a_graph_that_compiles_to_nothing_has_no_recipe_and_is_proved(newest: Path, tmp_path: Path) -> None:
    place = Place(newest, tmp_path)
    row = place.compiled(ONE_OPERATOR, fault="zero-metadata")
    assert isinstance(row, UnitRow), row

    proof = place.proved(row, fault="zero-metadata", graph=ONE_OPERATOR)

    assert sorted(row.artifact) == ["graph.txt", "unit.json"]
    assert isinstance(proof, ProofRow), proof
    assert (proof.num_recipes, proof.num_rounds) == (0, 1)


def test_recipes_that_only_a_program_needs_are_found_by_the_proof_and_recorded(
    newest: Path, tmp_path: Path
) -> None:
    place = Place(newest, tmp_path)
    row = place.compiled(fault="late-recipe")
    assert isinstance(row, UnitRow)

    proof = place.proved(row, fault="late-recipe")

    assert isinstance(proof, ProofRow), proof
    assert proof.num_rounds == 2
    keys = {RecipeName.parse(name) for name in proof.recipes}
    assert len(keys) == 2
    assert None not in keys


def test_nothing_queues_up_while_a_server_runs(newest: Path, tmp_path: Path) -> None:
    place = Place(newest, tmp_path)
    row = place.compiled()
    assert isinstance(row, UnitRow), row

    def serve() -> tuple[int, int]:
        import torch

        from aotgaudi.backends.hpu.runtime import HpuRuntime

        files = {name: (digest, place.store.objects.path(digest)) for name, digest in row.artifact.items()}
        runtime = HpuRuntime(place.target())
        runtime.restore((name, digest, path) for name, (digest, path) in files.items())
        unit = runtime.load({name: path for name, (_, path) in files.items()})
        tensors = (torch.ones(4, 8), torch.ones(8, 8), torch.zeros(12, 8), torch.tensor([3, 0, 7, 5]))
        inputs = [runtime.placement.put(tensor) for tensor in tensors]
        runtime.rehearse({"unit": lambda: unit.run(inputs)})
        for _ in range(100):
            unit.run(inputs)
        metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
        return len(metrics.metric_global("recipe_cache")._queue), runtime.num_compiled()

    assert place.in_fork(serve) == (0, 0)


def test_keys_that_never_repeat_in_another_process_are_refused_with_the_units_they_are_of(
    newest: Path, tmp_path: Path
) -> None:
    place = Place(newest, tmp_path)
    row = place.compiled(fault="key-unstable")
    assert isinstance(row, UnitRow)

    error = place.proved(row, fault="key-unstable")

    assert isinstance(error, AotGaudiError)
    assert error.exit_code == 6
    assert f"do not settle: {LABEL}" in str(error)


@pytest.mark.parametrize(("visible", "num_cards"), [("", 2), ("1", 1)])
def test_each_card_gets_one_worker_unless_the_vendors_variable_names_fewer(
    newest: Path, tmp_path: Path, visible: str, num_cards: int
) -> None:
    """A worker keeps its card, which the double gives to one process alone, so two that both compile have two."""
    place = Place(newest, tmp_path)

    def run() -> tuple[int, list[object]]:
        with pool_of(place) as pool:
            done = all_done(pool, place, (LAYER, OTHER))
        return pool.num_workers, [one.error for one in done]

    found = place.in_fork(run, AOTGAUDI_DOUBLE_CARDS="2", HABANA_VISIBLE_MODULES=visible)

    assert found == (1 + num_cards, [None, None])


def pool_of(place: Place) -> CardPool:
    return CardPool(locked_directory(place.store.root), 1, place.root / "toolcache", SECONDS)


def all_done(pool: CardPool, place: Place, graphs: Sequence[str]) -> list[Done]:
    for ticket, graph in enumerate(graphs):
        pool.submit(ticket, place.job(graph))
    done: list[Done] = []
    while len(done) < len(graphs):
        done += pool.wait(1.0)
    return done


def test_two_builds_at_once_have_a_card_each(newest: Path, tmp_path: Path) -> None:
    """Neither gives its card back before the other has compiled, and the double gives a card to one process alone."""
    place = Place(newest, tmp_path)

    def build(own: Path, other: Path, graph: str) -> Callable[[], None]:
        def run() -> None:
            with pool_of(place) as pool:
                errors = [one.error for one in all_done(pool, place, (graph,))]
                own.write_text(f"{pool.num_workers} {errors}", encoding="utf-8")
                wait_for(other)

        return run

    a, b = tmp_path / "a", tmp_path / "b"
    settings = {"AOTGAUDI_DOUBLE_CARDS": "2"}
    builds = (
        place.started(build(a, b, LAYER), HABANA_VISIBLE_MODULES="0", **settings),
        place.started(build(b, a, OTHER), HABANA_VISIBLE_MODULES="1", **settings),
    )
    while any(fork.poll() is None for fork in builds):
        time.sleep(0.01)

    assert [fork.poll() for fork in builds] == [0, 0]
    assert [path.read_text(encoding="utf-8") for path in (a, b)] == ["2 [None]"] * 2


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and path.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.exists(), f"{path.name} did not come"


@pytest.mark.nightly
@pytest.mark.alone
def test_two_cards_build_almost_twice_as_fast(newest: Path, tmp_path: Path) -> None:
    """Compilations take 15 s each, beside which our own work is little; each worker has compiled a unit before."""
    seconds = {}
    for visible in ("0", "0,1"):
        place = Place(newest, tmp_path / visible.replace(",", "-"))

        def run(place: Place = place, num_cards: int = len(visible.split(","))) -> float:
            graphs = [LAYER.replace("[12,8]", f"[{12 + number},8]") for number in range(num_cards + 6)]
            with pool_of(place) as pool:
                assert not any(one.error for one in all_done(pool, place, graphs[:num_cards]))
                began = time.monotonic()
                assert not any(one.error for one in all_done(pool, place, graphs[num_cards:]))
                return time.monotonic() - began

        settings = {"AOTGAUDI_DOUBLE_CARDS": "2", "AOTGAUDI_DOUBLE_COMPILE_MS": "15000"}
        seconds[visible] = place.in_fork(run, HABANA_VISIBLE_MODULES=visible, **settings)

    ratio = seconds["0"] / seconds["0,1"]
    print(f"6 units: {seconds['0']:.1f} s on one card, {seconds['0,1']:.1f} s on two: x {ratio:.2f}")
    assert ratio >= 1.7
