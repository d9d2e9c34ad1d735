"""Behaviours of the double (D-nn) that no check of doctor looks at, and what the Gaudi core makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.doctor.hpu.lab import Lab, Outcome
from aotgaudi.gaudi.environment import CACHE_VARIABLE, process_environment
from aotgaudi.gaudi.recipes import find_directories, scan
from tests.environment import ROOT
from tests.hpu.collecting import environment_of
from tests.hpu.forks import start_probe

pytestmark = pytest.mark.hpu_double

Settings = dict[str, str | None]


@pytest.fixture
def compile_one(newest: Path, tmp_path: Path) -> Callable[[Settings], Outcome]:
    """Has a process compile a graph, with some variables set or (None) removed."""
    (tmp_path / "state").mkdir()
    settings = {"AOTGAUDI_DOUBLE_STATE": str(tmp_path / "state")}
    lab = Lab(tmp_path, environment=environment_of(newest, tmp_path, **settings), start=start_probe)
    return lambda changes: lab.run("device.compile_one", environment=changes)


def test_a_shared_file_system_gets_names_with_their_writer(
    compile_one: Callable[[Settings], Outcome], tmp_path: Path
) -> None:
    """D-12: and nothing is left of what announced the compilation."""
    outcome = compile_one({CACHE_VARIABLE: f"{tmp_path / 'nfs'},true,1,true"})

    assert outcome.is_whole, outcome.problem
    found = scan(tmp_path / "nfs")
    assert len(found.pairs) == 1
    assert not found.leftovers
    assert found.pairs[0].recipe.name.count("_") == 4
    again = compile_one({CACHE_VARIABLE: f"{tmp_path / 'nfs'},true,1,true"})
    assert again.is_whole, again.problem
    assert len(list((tmp_path / "nfs").iterdir())) == 2  # Found, and not deleted.


def test_the_rank_is_appended_in_inference_mode(
    compile_one: Callable[[Settings], Outcome], tmp_path: Path
) -> None:
    """D-12: which is why a build removes both variables; the core finds such a directory all the same."""
    compile_one({CACHE_VARIABLE: f"{tmp_path / 'cache'},false,0", "RANK": "3", "PT_HPU_INFERENCE_MODE": "1"})

    assert find_directories(tmp_path / "cache") == (tmp_path / "cache3",)
    assert len(scan(tmp_path / "cache3").pairs) == 1


@pytest.mark.parametrize(("rank", "is_deleted"), [(None, True), ("0", True), ("1", False)])
def test_a_directory_is_emptied_at_the_start_by_the_first_rank_and_by_those_without_one(
    compile_one: Callable[[Settings], Outcome], tmp_path: Path, rank: str | None, is_deleted: bool
) -> None:
    """D-12."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "of-before").touch()

    compile_one({CACHE_VARIABLE: f"{cache},true,0", "LOCAL_RANK": rank})

    assert (cache / "of-before").exists() != is_deleted


def test_beyond_the_limit_the_oldest_pairs_go(
    compile_one: Callable[[Settings], Outcome], tmp_path: Path
) -> None:
    """D-13: which is why a build sets no limit."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "1_2_syn3.recipe").write_bytes(bytes(2 << 20))
    (cache / "1_2_syn3.metadata").write_bytes(b"holder")

    compile_one({CACHE_VARIABLE: f"{cache},false,1"})

    found = scan(cache)
    assert len(found.pairs) == 1
    assert found.pairs[0].key != "1"
    assert found.leftovers == ("eviction.lock",)


def test_a_recipe_that_is_torn_is_compiled_again(
    compile_one: Callable[[Settings], Outcome], tmp_path: Path
) -> None:
    """D-10: the bridge warns and misses; it does not mend what has metadata."""
    setting = {CACHE_VARIABLE: f"{tmp_path / 'cache'},false,0"}
    compile_one(setting)
    (pair,) = scan(tmp_path / "cache").pairs
    torn = pair.recipe.read_bytes()[:-1]
    pair.recipe.write_bytes(torn)

    outcome = compile_one(setting)

    assert outcome.values == {"error": 0.0}
    assert pair.recipe.read_bytes() == torn


def test_a_process_tells_what_it_counted_when_it_ends(
    compile_one: Callable[[Settings], Outcome], tmp_path: Path
) -> None:
    """D-14: the metrics file, one a process, with totals in the last record of each metric."""
    configured = tmp_path / "metrics.json"
    for rank in (None, None, "2"):
        compile_one({"PT_HPU_METRICS_FILE": str(configured), "RANK": rank})

    files = sorted(tmp_path.glob("metrics*"))
    totals = [
        {record["metric_name"]: dict(record["statistics"]) for record in json.loads(path.read_bytes())}
        for path in files
    ]

    assert [path.name for path in files] == ["metrics-rank2.json", "metrics.json", "metrics.json.1"]
    assert [metrics["graph_compilation"]["TotalNumber"] for metrics in totals] == [1, 1, 1]
    assert len(totals[0]["recipe_cache"]["RecipeMiss"]) == 1


def test_compile_only_stores_recipes_and_leaves_results_unset(
    compile_one: Callable[[Settings], Outcome], tmp_path: Path
) -> None:
    """D-17: which is why a build removes the variable."""
    outcome = compile_one({CACHE_VARIABLE: f"{tmp_path / 'cache'},false,0", "PT_COMPILE_ONLY_MODE": "1"})

    assert outcome.values["error"] > 1
    assert len(scan(tmp_path / "cache").pairs) == 1


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"AOTGAUDI_DOUBLE_CARDS": "0"}, "Device acquire failed. No devices found."),
        ({"AOTGAUDI_DOUBLE_MEMORY_MIB": "0"}, "Allocation failed for size::"),
    ],
)
def test_what_the_device_lacks_is_said_in_the_bridges_words(
    compile_one: Callable[[Settings], Outcome], settings: Settings, problem: str
) -> None:
    """D-20, D-22."""
    assert problem in compile_one(settings).problem


def test_a_busy_module_is_replaced_by_another_unless_others_are_hidden(newest: Path, tmp_path: Path) -> None:
    """D-20: which is why a process gets both variables."""
    (tmp_path / "state").mkdir()
    settings = {"AOTGAUDI_DOUBLE_STATE": str(tmp_path / "state"), "AOTGAUDI_DOUBLE_CARDS": "2"}
    environment = environment_of(newest, tmp_path, **settings)
    lab = Lab(tmp_path, environment=environment, module_id=1, start=start_probe)
    ready = tmp_path / "ready"

    words = ["device.hold", json.dumps({"ready": str(ready)}), str(tmp_path / "result")]
    holder = start_probe(words, process_environment(environment, tmp_path / "held", 1))
    try:
        while not ready.exists():
            assert holder.poll() is None
            time.sleep(0.01)
        refused = lab.run("device.compile_one")
        replaced = lab.run("device.compile_one", environment={"HABANA_VISIBLE_MODULES": None})
    finally:
        holder.kill()

    assert "Device acquire failed." in refused.problem
    assert replaced.is_whole, replaced.problem


def test_models_find_kernels_streams_generators_and_a_world_of_one(newest: Path, tmp_path: Path) -> None:
    """D-17, D-21, D-23, D-27 to D-32: what vllm-gaudi imports of the bridge, against what torch computes on the CPU."""
    (seen,) = printed_by("bridge_modules.py", [()], newest, tmp_path)
    far = {name: value for name, value in seen.items() if isinstance(value, float) and name != "cache"}
    assert far.keys() == {
        *("attention", "attention compiled", "norm", "norm compiled", "rotary", "rotary compiled"),
        "rotary pairs",
        *("experts", "experts compiled", "experts apart", "experts biased"),
    }
    assert max(far.values()) < 1e-5
    assert {name: value for name, value in seen.items() if name not in far} == {
        "grouped": [True, False, False],
        "last rows": [[[4, 5]], [[4, 5]]],
        "one hot": [[0, 0, 0], [0, 1, 0]],
        "current stream": True,
        "after it": True,
        "copied": [0, 1, 2],
        "in order": True,
        "a generator": [True, False],
        "the device's": [True, True],
        "a sum": [1.0, 1.0],
        "replayed": [[2.0, 2.0], True],
        "computed": [4.0, 4.0],
        "embedded": [2, 2],
        "ids": [0x7F7F7F7F] * 2,
        "to the device and back": [1, 2],
        "made": [2, 3],
        "cache": 0.0,
        "afterwards": [3.0, 4.0],
    }


def printed_by(
    script: str, words: Iterable[Sequence[str]], double: Path, directory: Path, **settings: str
) -> list[dict[str, Any]]:
    """Returns what processes beside the double print as JSON, one for each row of words, at the same time."""
    environment = dict(environment_of(double, directory, **settings))
    # A server compiles, and falls back.
    for name in ("PT_HPU_DISALLOW_TORCH_COMPILE", "PT_HPU_USE_EAGER_FALLBACK"):
        environment.pop(name, None)
    command = [sys.executable, str(ROOT / "tests" / "hpu" / script)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, *row], env=environment, stdout=pipe, stderr=pipe, text=True)
        for row in words
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [json.loads(printed) for printed, _ in outputs]


def test_two_ranks_exchange_tensors_alone_and_in_graphs_each_with_a_card(
    newest: Path, tmp_path: Path
) -> None:
    """D-20, D-31: what vllm-gaudi's communicator does with two workers (``hpu_communicator.py``)."""
    (tmp_path / "state").mkdir()
    settings = {"AOTGAUDI_DOUBLE_STATE": str(tmp_path / "state"), "AOTGAUDI_DOUBLE_CARDS": "2"}

    seen = printed_by(
        "two_ranks.py", [(rank, str(tmp_path / "store")) for rank in "01"], newest, tmp_path, **settings
    )

    assert {rank.pop("card") for rank in seen} == {0, 1}
    kinds = ("torch.float32", "torch.bfloat16", "torch.int64")
    both = {
        **{f"sum, {kind}": [10, 12] for kind in kinds},
        "gathered": [0, 1, 10, 11],
        "gathered apart": [[0, 1], [10, 11]],
        "told": [10, 11],
        "passed": [0, 1],
        "compiled sum": [24, 28],
        "compiled gathered": [2, 22, 4, 24],
    }
    assert seen == [
        {
            **both,
            "scattered": [10, 12],
            "swapped": [0, 10],
            "a row": [[0, 1], [14, 16], [4, 5]],
            "alone": [0, 1],
            "compiled scattered": [24, 28],
        },
        {
            **both,
            "scattered": [14, 16],
            "swapped": [1, 11],
            "a row": [[10, 11], [14, 16], [14, 15]],
            "alone": [10, 11],
            "compiled scattered": [32, 36],
        },
    ]
