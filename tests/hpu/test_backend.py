"""The HPU backend on the double: a build that is proved, a server that compiles nothing, and what either refuses by name."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from aotgaudi.compile.cards import CardPool
from aotgaudi.compile.jobs import run_compile
from aotgaudi.compile.keys import ProofRow, UnitRow
from aotgaudi.compile.workers import Done
from aotgaudi.errors import AotGaudiError, CardError, StoreError, TargetError
from aotgaudi.gaudi.recipes import RecipeName
from aotgaudi.store.scratch import locked_directory, sweep_temporary_files
from aotgaudi.store.store import Store
from tests.environment import ROOT
from tests.hpu.benches import (
    DEFAULTS,
    NUM_MANY,
    NUM_SOME,
    NUM_TOKENS,
    PROMPT,
    SAMPLINGS,
    SPEC,
    USERS,
    Bench,
    ask_for_a_mix,
    events,
    greedy_text,
)
from tests.hpu.collecting import LABEL, LAYER, NOT_LOWERED, ONE_OPERATOR, OTHER, SECONDS, Place
from tests.hpu.conftest import InstalledDouble

pytestmark = [pytest.mark.hpu_double, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_RESTARTS = 20


# A whole: from a spec to a server


def test_a_build_is_proved_and_a_second_one_starts_no_process_with_the_bridge(bench: Bench) -> None:
    journal = bench.folder / "second"

    again = bench.run("build", "spec.toml", "-o", "b2.bundle", AOTGAUDI_DOUBLE_JOURNAL=str(journal))

    first = (bench.folder / "build.txt").read_text(encoding="utf-8")
    assert "units compiled and checked" in first
    assert "proof: a new process found all " in first
    assert ", and compiled 0 (round 1)" in first
    assert again.returncode == 0, again.stderr
    assert "cache: nothing to do" in again.stdout
    assert not journal.exists()
    assert (bench.folder / "b2.bundle" / "receipt.json").read_bytes() == (
        bench.folder / "b.bundle" / "receipt.json"
    ).read_bytes()


def test_a_check_compares_keys_and_numbers_and_says_why_not_bytes(bench: Bench) -> None:
    done = bench.run("build", "cache", "spec.toml", "--check", "--sample", "2")

    assert done.returncode == 0, done.stderr
    assert "2 units compiled again" in done.stdout
    assert "a recipe's bytes hold a counter of the process that compiled it" in done.stdout


def test_a_server_gives_the_tokens_of_transformers_and_the_bridge_compiles_nothing_until_it_forgets(
    bench: Bench,
) -> None:
    """No operator runs outside a graph. When the bridge does compile, the step is counted, logged, and /ready says so."""
    journal, forget = bench.folder / "served", bench.folder / "state" / "forget"
    settings = {
        "AOTGAUDI_DOUBLE_JOURNAL": str(journal),
        "AOTGAUDI_DOUBLE_FAULTS": "eager-op-raises,live-compile",
    }

    with bench.server(**settings) as server:
        answer = server.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)["choices"][0]["text"]
        ask_for_a_mix(server, NUM_SOME)
        compiled = server.metric("aotgaudi_compilations_total", cause="backend")
        seen, ready = events(journal), server.client.get("/ready").status_code
        forget.touch()
        server.complete(PROMPT, max_tokens=1)
        forget.unlink()
        compiled_then = server.metric("aotgaudi_compilations_total", cause="backend")
        unready = server.client.get("/ready")
    log = server.log

    assert answer == greedy_text(bench.folder / "model")
    assert "recipes found by the bridge, 0 compiled" in log
    assert (compiled, ready) == (0, 200)
    assert "CACHE_HIT" in seen
    assert not {"GRAPH_COMPILE", "CACHE_MISS", "CPU_FALLBACK"} & set(seen)
    assert compiled_then == events(journal).count("GRAPH_COMPILE") > 0
    assert unready.status_code == 503
    assert f"the device has compiled {compiled_then:.0f} graphs since the server was ready" in unready.text
    assert "was not warmed-up" in log


def test_the_defaults_are_built_proved_and_served(newest: Path, tmp_path: Path) -> None:
    """bfloat16, contiguous attention, with exchanges of blocks that really happen, and all samplers."""
    defaults = Bench(tmp_path / "defaults", newest, DEFAULTS)
    defaults.build()
    second, journal = tmp_path / "second", tmp_path / "journal"

    again = defaults.run("build", "spec.toml", "-o", "b2.bundle", AOTGAUDI_DOUBLE_JOURNAL=str(second))
    verified = defaults.run("verify", "b.bundle")
    settings = {"AOTGAUDI_DOUBLE_JOURNAL": str(journal), "AOTGAUDI_DOUBLE_FAULTS": "eager-op-raises"}
    with defaults.server(**settings) as server:
        answer = server.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)["choices"][0]["text"]
        ask_for_a_mix(server, NUM_SOME, SAMPLINGS)
        compiled = server.metric("aotgaudi_compilations_total", cause="backend")
        swaps = server.metric("aotgaudi_defrag_swaps_total")

    assert (again.returncode, verified.returncode) == (0, 0), again.stderr + verified.stderr
    assert "cache: nothing to do" in again.stdout
    assert not second.exists()
    wanted = greedy_text(defaults.folder / "model", 0.1)
    assert len(wanted) > 10
    assert answer.startswith(wanted)
    assert compiled == 0
    assert swaps > 0
    assert not {"GRAPH_COMPILE", "CACHE_MISS", "CPU_FALLBACK"} & set(events(journal))


@pytest.mark.nightly
def test_many_requests_and_many_restarts_compile_nothing(newest: Path, tmp_path: Path) -> None:
    busy, journal = Bench(tmp_path / "busy", newest), tmp_path / "journal"
    busy.build()

    with busy.server(
        AOTGAUDI_DOUBLE_JOURNAL=str(journal), AOTGAUDI_DOUBLE_FAULTS="eager-op-raises"
    ) as server:
        answer = server.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)["choices"][0]["text"]
        ask_for_a_mix(server, NUM_MANY)
        compiled = server.metric("aotgaudi_compilations_total", cause="backend")

    assert answer == greedy_text(busy.folder / "model")
    assert compiled == 0
    assert not {"GRAPH_COMPILE", "CACHE_MISS", "CPU_FALLBACK"} & set(events(journal))

    for number in range(NUM_RESTARTS):
        restarted = tmp_path / f"restart-{number}"
        with busy.server(AOTGAUDI_DOUBLE_JOURNAL=str(restarted)) as server:
            server.complete(PROMPT, max_tokens=4)

        assert "CACHE_HIT" in events(restarted)
        assert not {"GRAPH_COMPILE", "CACHE_MISS"} & set(events(restarted)), number


@pytest.mark.nightly
def test_the_cpu_backends_own_bundle_gives_the_same_tokens(bench: Bench) -> None:
    (bench.folder / "cpu.toml").write_text(SPEC.replace('"hpu"', '"cpu"'), encoding="utf-8")
    plain = {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    built = bench.run("build", "cpu.toml", "-o", "cpu.bundle", "-j", "1", **plain)
    assert built.returncode == 0, built.stderr

    with bench.server("cpu.bundle", **plain) as server:
        answer = server.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)["choices"][0]["text"]

    assert answer == greedy_text(bench.folder / "model")


def test_what_the_user_set_for_recipes_is_replaced(bench: Bench) -> None:
    """Nothing of theirs is used, emptied or made anew, neither by what compiles nor by what serves."""
    theirs, journal = bench.folder / "theirs", bench.folder / "replaced"
    theirs.mkdir()
    (theirs / "1_0_synX.recipe").write_text("theirs", encoding="utf-8")

    checked = bench.run("build", "cache", "spec.toml", "--check", "--sample", "1", **USERS)
    with bench.server(**USERS, AOTGAUDI_DOUBLE_JOURNAL=str(journal)) as server:
        server.complete(PROMPT, max_tokens=4)

    assert checked.returncode == 0, checked.stderr
    assert "CACHE_HIT" in events(journal)
    assert not {"GRAPH_COMPILE", "CACHE_MISS"} & set(events(journal))
    assert [path.name for path in bench.folder.glob("theirs*")] == ["theirs"]
    assert [path.name for path in theirs.iterdir()] == ["1_0_synX.recipe"]


@pytest.mark.nightly
def test_a_card_that_does_not_answer_ends_a_build_and_a_start(bench: Bench) -> None:
    hung = {"AOTGAUDI_DOUBLE_FAULTS": "hang", "HABANA_VISIBLE_MODULES": "0"}
    with ThreadPoolExecutor(2) as pool:
        building = pool.submit(
            bench.run,
            "build",
            "spec.toml",
            "-o",
            "h.bundle",
            **hung,
            AOTGAUDI_STORE=str(bench.folder / "empty"),
        )
        command = ["serve", "--bundle", "b.bundle", "--model", "model", "--require-warm", "--port", "0"]
        serving = pool.submit(bench.run, *command, **hung)

    for done, code in ((building.result(), 6), (serving.result(), 5)):
        assert done.returncode == code, done.stderr
        assert "the card with module id 0 does not answer" in done.stderr


@pytest.mark.parametrize("lacking", ["artifact", "num_rounds"], ids=["compiling", "proving"])
def test_sigterm_to_its_group_ends_a_build_within_seconds(bench: Bench, tmp_path: Path, lacking: str) -> None:
    """It lacks its units, whose compilation takes an hour, or the proof. Nothing runs on, and no lock is held."""
    shutil.copytree(bench.folder / "store", tmp_path / "store")
    store, out = Store.open(tmp_path / "store"), tmp_path / "out"
    rows = store.actions.get_many(store.actions)
    for key in [key for key, row in rows.items() if lacking in row]:
        store.actions.discard(key)
    settings = {"AOTGAUDI_STORE": str(store.root), "AOTGAUDI_DOUBLE_COMPILE_MS": "3600000"}
    words = ["build", "spec.toml", "-o", str(tmp_path / "b.bundle"), "-j", "1"]
    with out.open("wb") as file:
        build = psutil.Popen(
            [sys.executable, "-m", "aotgaudi", *words],
            cwd=bench.folder,
            env=bench.environment(**settings),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline, processes = time.monotonic() + SECONDS, []
    while not processes and time.monotonic() < deadline:
        time.sleep(0.01)
        if list((store.root / "tmp").glob("unit-*/recipes*")):
            processes = build.children(recursive=True)

    os.killpg(build.pid, signal.SIGTERM)

    assert build.wait(60) == 130, out.read_text()
    assert processes
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert "Traceback" not in out.read_text()
    sweep_temporary_files(store.root)
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "component"),
    [
        (
            {"AOTGAUDI_DOUBLE_DEVICE": "gaudi3"},
            "target.machine: compiled for gaudi2, this machine has gaudi3",
        ),
        ({"GC_KERNEL_PATH": "/etc/hostname"}, "target.flags.env.GC_KERNEL_PATH"),
        ({"FUSER_ENABLE_LOW_UTILIZATION": "1"}, "target.flags.env.FUSER_ENABLE_LOW_UTILIZATION"),
    ],
)
def test_another_machine_is_refused_by_component(
    bench: Bench, settings: Mapping[str, str], component: str
) -> None:
    verified = bench.run("verify", "b.bundle", **settings)
    served = bench.run(
        *["serve", "--bundle", "b.bundle", "--model", "model", "--require-warm", "--port", "0"], **settings
    )

    assert (verified.returncode, served.returncode) == (5, 5), served.stderr
    assert component in verified.stderr
    assert component in served.stderr


def test_a_server_refuses_a_damaged_recipe_one_that_is_gone_and_too_little_memory(
    bench: Bench, tmp_path: Path
) -> None:
    serve = ["serve", "--model", "model", "--require-warm", "--port", "0", "--bundle"]
    damaged = tmp_path / "damaged.bundle"
    shutil.copytree(bench.folder / "b.bundle", damaged)
    receipt = json.loads((damaged / "receipt.json").read_bytes())
    unit = next(iter(receipt["units"].values()))
    digest = next(text for name, text in unit["artifact"].items() if name.endswith(".recipe"))
    (path,) = damaged.rglob(f"*{digest.split(':')[1][2:20]}*")
    path.chmod(0o600)
    path.write_bytes(b"x" + path.read_bytes()[1:])

    corrupt = bench.run(*serve, str(damaged))
    path.unlink()
    lacking = bench.run(*serve, str(damaged))
    small = bench.run(*serve, "b.bundle", AOTGAUDI_DOUBLE_MEMORY_MIB="0")

    assert corrupt.returncode == 4, corrupt.stderr
    assert lacking.returncode == 3, lacking.stderr
    assert small.returncode == 5, small.stderr
    assert "the card has too little memory" in small.stderr
    assert "no number of KV blocks would fit" in small.stderr


# A unit: what compiling and proving refuse


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
