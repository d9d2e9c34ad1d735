"""The offline half from Python: what a spec needs, what the store lacks of it, and the commands that go on from here.

    python examples/build_and_serve_cpu.py manifests/tiny-llama.cpu.toml --store .aotgaudi/store

Compiles nothing, and imports no torch. With ``--build`` it compiles what is missing and seals a bundle.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps, uncovered
from aotgaudi.build.plan import Plan
from aotgaudi.errors import AotGaudiError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.pipeline import build, plan_manifest
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.store import Store


def main() -> int:
    """Returns the process's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", type=Path)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--build", type=Path, metavar="DIR", help="compile what is missing, and seal it there"
    )
    args = parser.parse_args()
    try:
        run(args.spec, args.store, args.jobs, args.build)
    except AotGaudiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(spec_path: Path, store_root: Path, num_jobs: int, out: Path | None) -> None:
    """Spec -> manifest -> plan, printed; and on to a bundle where `out` says so."""
    manifest = Manifest.of(load_spec(spec_path))
    show_manifest(manifest)
    store = Store.open(store_root)
    plan = plan_manifest(manifest, store)
    show_plan(plan, num_jobs)
    if out is None:
        print(f"next:     aotgaudi build {spec_path} --store {store_root} -o BUNDLE")
    else:
        result = build(manifest, out, store=store, jobs=num_jobs)
        print(f"built:    {len(result.outcome.compiled)} units, sealed in {result.bundle}")
    print("then:     aotgaudi serve --bundle BUNDLE --model MODEL_DIR --require-warm")


def show_manifest(manifest: Manifest) -> None:
    """Prints how many entries there are of each kind, and whether they cover what can be reached."""
    counts = Counter(entry.kind for entry in manifest.entries)
    holes = list(
        uncovered(ReachableSteps.of(manifest.spec.limits), BucketTable.from_entries(manifest.entries))
    )
    print(f"manifest: {manifest.id[:16]}, {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
    print(f"coverage: {holes[0] if holes else 'every step that the scheduler can form has an entry'}")


def show_plan(plan: Plan, num_jobs: int) -> None:
    """Prints what the store has and what it lacks."""
    print(f"target:   {plan.target.backend} {plan.target.machine}, {plan.target.toolchain}")
    print(f"programs: {len(plan.programs)}, of which {len(plan.untraced)} are to be traced")
    print(f"units:    {len(plan.units)} in the store, {len(plan.missing_units)} known to be missing")
    print(f"estimate: {plan.estimate_seconds(num_jobs):.0f} s on {num_jobs} workers")


if __name__ == "__main__":
    sys.exit(main())
