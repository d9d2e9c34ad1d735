"""A build from an empty store: units, calls, CPU seconds a unit, and how busy the workers are.

Parallel efficiency is CPU seconds of the whole process tree / (workers x wall seconds): 1.0 is every worker
computing all the time. The tree's CPU includes what is no compiling: importing torch in each worker, tracing.
"Busy" is the share of the workers' wall time in which they had a unit in hand. On a machine that does other
things busy stays and efficiency falls.
"""

from __future__ import annotations

import json
import resource
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import harness
from harness import ROOT, Spread, Table

from aotgaudi.digest import Digest
from aotgaudi.graphs.program import Program
from aotgaudi.store.cas import object_path

DEFAULT_SPEC = ROOT / "manifests" / "tiny-llama.cpu.toml"


def main() -> None:
    """Measures, prints, writes."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--spec", type=Path, default=DEFAULT_SPEC, help="[default: the tiny model's]")
    parser.add_argument(
        "--jobs", type=int, nargs="+", default=[2], help="workers; several give several builds"
    )
    parser.add_argument("--work", type=Path, help="folder of the temporary stores")
    args = parser.parse_args()
    machine = harness.environment({"workers": args.jobs, "threads a worker": 1})
    builds = [build(args.spec, jobs, args.work) for jobs in args.jobs]
    tables = [_table(builds), _kinds(builds[0])]
    harness.finish("build", args, machine, {"builds": builds}, tables)


def build(spec: Path, jobs: int, work: Path | None) -> dict[str, Any]:
    """Builds a spec into an empty store. Returns what it cost and what came of it."""
    with tempfile.TemporaryDirectory(prefix="aotgaudi-bench-", dir=work) as folder:
        store, receipt = Path(folder) / "store", Path(folder) / "receipt.json"
        before = _children_cpu_seconds()
        options: list[str | Path] = ["--store", store, "-j", str(jobs), "--receipt", receipt, "--json"]
        wall, text = harness.run(harness.command("build", "cache", spec.resolve(), *options))
        cpu = _children_cpu_seconds() - before
        outcome = json.loads(text)
        entries: dict[str, str] = json.loads(receipt.read_bytes())["programs"]
        programs = {digest: _program(store, digest) for digest in set(entries.values())}
    unit_cpu = sum(unit["cpu_seconds"] for unit in outcome["units"])
    return {
        "jobs": jobs,
        "wall_seconds": wall,
        "build_seconds": outcome["seconds"],
        "cpu_seconds": cpu,
        "unit_cpu_seconds": unit_cpu,
        "efficiency": cpu / (jobs * wall),
        "unit_efficiency": unit_cpu / (jobs * wall),
        "busy": sum(unit["compile_seconds"] for unit in outcome["units"]) / (jobs * wall),
        "entries": len(entries),
        "programs": len(programs),
        "calls": sum(len(program.calls) for program in programs.values()),
        "units": outcome["units"],
        "num_traced": outcome["num_traced"],
    }


def _program(store: Path, digest: str) -> Program:
    return Program.model_validate_json(object_path(store, Digest.parse(digest)).read_bytes())


def _children_cpu_seconds() -> float:
    """CPU of all processes that were started here and have ended, their own children included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _table(builds: list[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            str(b["jobs"]),
            str(b["entries"]),
            str(b["programs"]),
            str(b["calls"]),
            str(len(b["units"])),
            f"{b['wall_seconds']:.1f}",
            f"{b['cpu_seconds']:.1f}",
            f"{b['unit_cpu_seconds'] / max(1, len(b['units'])):.2f}",
            f"{b['efficiency']:.2f}",
            f"{b['unit_efficiency']:.2f}",
            f"{b['busy']:.2f}",
        )
        for b in builds
    )
    columns = (
        "workers",
        "entries",
        "programs",
        "calls",
        "units",
        "wall s",
        "CPU s",
        "CPU s a unit",
        "efficiency",
        "of it units",
        "busy",
    )
    note = (
        "Empty store, whole process. Efficiency: CPU seconds / (workers x wall seconds); "
        "of it units: without imports and traces."
    )
    return Table("Build from an empty store", columns, rows, note)


def _kinds(built: dict[str, Any]) -> Table:
    kinds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for unit in built["units"]:
        kinds[unit["label"].split(" ", 1)[0]].append(unit)
    rows = tuple(
        (
            kind,
            str(len(units)),
            Spread(tuple(unit["compile_seconds"] for unit in units)).text(),
            Spread(tuple(unit["cpu_seconds"] for unit in units)).text(),
        )
        for kind, units in sorted(kinds.items())
    )
    note = f"{built['jobs']} workers, one thread each; the numerical check included."
    return Table(
        "Units by kind",
        ("unit", "count", "wall s: median (min to max)", "CPU s: median (min to max)"),
        rows,
        note,
    )


if __name__ == "__main__":
    main()
