"""The HPU backend on the double: a build that is proved, a server that compiles nothing, and what either refuses by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from aotgaudi.store.scratch import sweep_temporary_files
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
from tests.hpu.collecting import SECONDS

pytestmark = [pytest.mark.hpu_double, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_RESTARTS = 20


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
