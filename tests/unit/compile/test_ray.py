"""Builds on a Ray cluster, which each test starts in a process of its own: results, faults, lost workers and nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.compile.ray import RayPlace, _scratch_store
from aotgaudi.errors import SpecError, StoreError

pytestmark = pytest.mark.process


def test_the_scratch_of_a_node_is_in_no_directory_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"aotgaudi-{os.geteuid()}").symlink_to("theirs")

    with pytest.raises(StoreError, match="is not a directory of ours"):
        _scratch_store("s3://bucket")


is_required = os.environ.get("AOTGAUDI_REQUIRE_RAY") == "1"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and not is_required,
    reason="Ray is not installed: pip install 'aotgaudi[ray]'",
)

_HEAD = """
import json, os, signal, sys, threading, time
from pathlib import Path
import psutil
from aotgaudi.backends.fake import probe
from aotgaudi.compile.plan import make_plan
from aotgaudi.compile.ray import RayPlace, RayPool
from aotgaudi.compile.run import Watch, run_plan
from aotgaudi.store.store import Store
from tests.workload import seeded_plan, tiny_spec

folder = Path(sys.argv[1])
store, target = Store.open(folder / "store"), probe({"journal": str(folder / "journal")})

def compiles():
    path = folder / "journal"
    return path.read_text().split() if path.exists() else []

def tasks_processes():
    '''The processes in which jobs run, wherever in the cluster.'''
    lines = {p: " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])}
    return [p for p, line in lines.items() if "aotgaudi.compile.workers" in line and str(folder) in line]

def report(outcome):
    done = make_plan([e for s in plan.programs for e in s.entries], tiny_spec(), target, store)
    print(json.dumps({"compiled": sorted(row.label for row in outcome.compiled), "compiles": len(compiles()),
        "failures": {f.label: f.message for f in outcome.failures}, "interrupted": outcome.interrupted,
        "complete": done.is_complete, "processes": len(tasks_processes()), **extra}))

def run(place, timeout_seconds=60.0, **options):
    pool = RayPool(place, store, num_workers=2, timeout_seconds=timeout_seconds)
    return run_plan(plan, tiny_spec(), store, pool, Watch(**options))

extra = {}
"""


def on_cluster(folder: Path, body: str, **environment: str) -> dict[str, Any]:
    """Runs `body` after `_HEAD`, in a process that may start a cluster."""
    script = folder / "script.py"
    script.write_text(_HEAD + body, encoding="utf-8")
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, **environment, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@needs_ray
def test_workers_of_a_cluster_import_nothing_from_where_the_build_was_started(tmp_path: Path) -> None:
    body = """
from aotgaudi.compile.ray import connected
(folder / "elsewhere").mkdir()
os.chdir(folder / "elsewhere")
with connected("local", 1) as ray:
    path = ray.get(ray.remote(lambda: __import__("sys").path).remote())
print(json.dumps({"path": path, "here": os.getcwd()}))
"""
    found = on_cluster(tmp_path, body)

    assert found["here"] not in found["path"]


@needs_ray
def test_a_local_cluster_compiles_each_unit_once_and_reports_faults_as_this_machine_would(
    tmp_path: Path,
) -> None:
    said = on_cluster(
        tmp_path,
        """
faulty = ("head c", "swap !fail", "swap !die", "swap !hang")
plan = seeded_plan(store, [("layer a", "head b !slow", "head c"), faulty], target)
report(run(RayPlace("local"), timeout_seconds=10.0))
""",
    )

    assert said["compiled"] == ["head b !slow", "head c", "layer a"]
    assert said["failures"] == {
        "swap !fail": "told to fail",
        "swap !die": "the worker process was killed by signal 9",
        "swap !hang": "timed out",
    }
    assert said["compiles"] == 3 + 2 * 3
    assert not said["interrupted"]


@needs_ray
def test_nodes_without_the_store_exchange_texts_and_results_through_a_remote(tmp_path: Path) -> None:
    said = on_cluster(
        tmp_path,
        """
plan = seeded_plan(store, [("layer a", "head b"), ("head b", "head c")], target)
place = RayPlace("local", exchange=str(folder / "remote"))
outcome = run(place)
extra = {"records_at_remote": len(list((folder / "remote/records").glob("*/*.json")))}
for digest in store.objects.digests():
    store.objects.verify(digest)
report(outcome)
""",
        TMPDIR=str(tmp_path),
        RAY_TMPDIR="/tmp",
    )

    assert said["complete"]
    assert said["compiles"] == said["records_at_remote"] == 3
    assert (tmp_path / f"aotgaudi-{os.geteuid()}").stat().st_mode & 0o777 == 0o700


@needs_ray
def test_a_worker_process_that_is_killed_mid_build_costs_one_unit(tmp_path: Path) -> None:
    said = on_cluster(
        tmp_path,
        """
plan = seeded_plan(store, [[f"layer {n} !slow" for n in range(10)]], target)
killed = []
def kill_one(_):
    if len(compiles()) >= 3 and not killed:
        victim = tasks_processes()[0]
        killed.append(victim.ppid())
        os.kill(victim.ppid(), signal.SIGKILL)  # Ray's own worker: ours dies with it.
outcome = run(RayPlace("local"), on_progress=kill_one)
extra = {"killed": len(killed)}
report(outcome)
""",
    )

    assert said["killed"] == 1
    assert (said["complete"], said["failures"]) == (True, {})
    assert said["compiles"] <= 11, "no more than the unit under way was done again"


@needs_ray
def test_a_node_that_dies_loses_only_the_units_that_it_ran(tmp_path: Path) -> None:
    said = on_cluster(
        tmp_path,
        """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
plan = seeded_plan(store, [[f"layer {n} !slow" for n in range(16)]], target)
killed = []
def kill_node(_):
    if len(compiles()) >= 6 and not killed:
        killed.append(1)
        cluster.remove_node(second, allow_graceful=False)
outcome = run(RayPlace(cluster.address), on_progress=kill_node)
extra = {"killed": len(killed)}
cluster.shutdown()
report(outcome)
""",
    )

    assert said["killed"] == 1
    assert (said["complete"], said["failures"]) == (True, {})
    assert said["compiles"] <= 16 + 2


@needs_ray
def test_a_stop_leaves_the_rest_to_the_next_run_and_no_process_behind(tmp_path: Path) -> None:
    said = on_cluster(
        tmp_path,
        """
plan = seeded_plan(store, [[f"layer {n} !slow" for n in range(20)]], target)
handler = signal.getsignal(signal.SIGTERM)
seen = []
def look(_):
    seen.append(signal.getsignal(signal.SIGTERM) is handler)
outcome = run(RayPlace("local"), should_stop=lambda: len(compiles()) >= 4, on_progress=look)
deadline = time.monotonic() + 20
while tasks_processes() and time.monotonic() < deadline:
    time.sleep(0.1)
extra = {"handler_is_ours": all(seen)}
report(outcome)
""",
    )

    assert said["interrupted"]
    assert said["compiles"] == len(said["compiled"]) < 20
    assert said["handler_is_ours"]
    assert said["processes"] == 0


@needs_ray
def test_a_cluster_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    said = on_cluster(
        tmp_path,
        """
from aotgaudi.errors import CompileError
plan = seeded_plan(store, [("layer a",)], target)
try:
    run(RayPlace("127.0.0.1:1"))
except CompileError as error:
    print(json.dumps({"error": str(error)}))
""",
    )

    assert said["error"].startswith("cannot use the Ray cluster at 127.0.0.1:1: ")


def test_a_place_for_exchange_means_the_same_on_every_node() -> None:
    for url in ("./exchange", "~/exchange"):
        with pytest.raises(SpecError, match="another directory on every node"):
            RayPlace("auto", url)
    assert RayPlace("auto", "memory://bucket/prefix").exchange
