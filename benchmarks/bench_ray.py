"""The same builds with local workers and on a Ray cluster of one node: what Ray costs.

The cluster is there already, as it is in practice; connecting to it counts. Units of the fake backend take 0.2 s each; with
``--real``, units of a small model are compiled too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Spread

from aotgaudi.compile.jobs import BuildJob
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.compile.ray import RayPlace, RayPool
from aotgaudi.compile.run import Watch, run_plan
from aotgaudi.compile.workers import LocalPool, Pool
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.store import Store
from tests.workload import Workload

LIMIT = 1.15
REAL_SPEC = Path(__file__).parent / "reliability" / "tiny-llama.toml"

Build = Callable[[Path, bool], float]


def build_fake(folder: Path, workers: int, units: int, address: str, on_ray: bool) -> float:
    """Seconds to build `units` units of the fake backend."""
    work = Workload((tuple(f"layer {n} !slow" for n in range(units)),), folder / "journal")
    store = Store.open(folder / "store")
    work.seed(store)
    plan, began = work.plan(store), time.perf_counter()
    outcome = run_plan(plan, work.spec, store, _pool(store, "fake", workers, address, on_ray), Watch())
    assert len(outcome.compiled) == units
    return time.perf_counter() - began


def build_real(folder: Path, workers: int, address: str, on_ray: bool) -> float:
    """Seconds to build a small model for the CPU."""
    manifest = Manifest.of(load_spec(REAL_SPEC))
    store = Store.open(folder / "store")
    plan, began = plan_manifest(manifest, store), time.perf_counter()
    outcome = run_plan(plan, manifest.spec, store, _pool(store, "cpu", workers, address, on_ray), Watch())
    assert outcome.compiled
    assert not outcome.failures
    return time.perf_counter() - began


def _pool(store: Store, backend: str, workers: int, address: str, on_ray: bool) -> Pool[BuildJob]:
    if on_ray:
        return RayPool(RayPlace(address, backend), store, num_workers=workers)
    return LocalPool(workers, store.root / "toolcache")


def measure(build: Build, repeats: int) -> tuple[Spread, Spread]:
    """Seconds with local workers and on Ray, in turn."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for on_ray, found in samples.items():
            folder = Path(tempfile.mkdtemp(prefix="aotgaudi-ray-"))
            try:
                found.append(build(folder, on_ray))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            print(f"{'ray' if on_ray else 'local'}: {found[-1]:.2f} s", flush=True)
    return Spread(tuple(samples[False])), Spread(tuple(samples[True]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--units", type=int, default=200, help="of the fake backend [default: 200]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="also compile a small model")
    args = parser.parse_args()
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": args.workers, "include_dashboard": False}
    )
    builds: dict[str, Build] = {
        f"{args.units} fake units of 0.2 s": lambda folder, on_ray: build_fake(
            folder, args.workers, args.units, cluster.address, on_ray
        )
    }
    if args.real:
        builds["a small model on the CPU"] = lambda folder, on_ray: build_real(
            folder, args.workers, cluster.address, on_ray
        )
    print(f"{args.workers} workers")
    for name, build in builds.items():
        local, ray = measure(build, args.repeats)
        ratio = ray.median / local.median
        print(
            f"{name}: local {local.text()} s, Ray {ray.text()} s: {ratio:.2f} x ({LIMIT} allowed)", flush=True
        )
    cluster.shutdown()


if __name__ == "__main__":
    main()
