"""Builds with nothing to do, and how fast a store is verified.

**Many entries.** The store is made, not built: every entry has its own program of three units, as in large models (one
embedding, one layer and one head a shape), so 5,000 entries are 20,000 records and 35,000 objects.

**A real spec** (``--spec`` and ``--store``, which has it built): `aotgaudi build SPEC` and the enumeration alone, whole
processes, and proof that torch stays out. The result's name is ``rebuild``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from harness import Spread, Table, verdict

from aotgaudi.backends.fake import probe
from aotgaudi.compile.keys import ProgramKeys, ProgramRow, UnitRow, UnitSource, record, unit_key
from aotgaudi.entries import PromptEntry
from aotgaudi.manifest.manifest import Manifest, write_manifest
from aotgaudi.spec.parse import parse_spec
from aotgaudi.store.fsck import check_store
from aotgaudi.store.store import Store

NOTHING_TO_DO_SECONDS, VERIFY_BYTES_A_SECOND = 1.0, 1.0e9
MANIFEST_SECONDS = 0.3
HEAVY = ("torch", "transformers", "numpy", "sympy")
IMPORTED = f"""
import json, sys
from aotgaudi.cli.main import cli
try:
    cli.main(sys.argv[1:], prog_name="aotgaudi")
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
LARGE_OBJECTS, LARGE_BYTES = 8, 128 << 20

SPEC = """
schema = "aotgaudi.spec/1"
[model]
name = "many"
dtype = "float32"
config = { model_type = "llama", max_position_embeddings = 512 }
[limits]
max_num_seqs = 1
max_num_batched_tokens = 16
max_model_len = 16
block_size = 16
num_blocks = 1
[defrag]
enabled = false
[target]
backend = "fake"
"""


def main() -> None:
    """Measures, prints, writes."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--entries", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--spec", type=Path, help="a spec that --store has built")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--large-spec", type=Path, help="a spec with a large table, enumerated only")
    args = parser.parse_args()
    if args.spec is not None:
        measure_rebuild(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure_nothing_to_do(Path(folder), args.entries, args.runs)
        result |= measure_verifying(Path(folder) / "large")
    harness.finish("store", args, harness.environment(), result, [_table(result)])


def measure_nothing_to_do(folder: Path, num_entries: int, num_runs: int) -> dict[str, Any]:
    """Times the whole process: without an index (all records are read), and then with one."""
    manifest = make_store(folder, num_entries)
    write_manifest(folder / "many.manifest.json", manifest)
    command = [sys.executable, "-m", "aotgaudi", "build", "cache", str(folder / "many.manifest.json")]
    command += ["--store", str(folder / "store")]
    timed(command)  # Warms the page cache, writes bytecode.
    rescans = []
    for _ in range(num_runs):
        shutil.rmtree(folder / "store" / "index")
        rescans.append(timed(command))
    return {
        "num_entries": num_entries,
        "rescan_seconds": Spread(tuple(wall for wall, _ in rescans)).json(),
        **_spreads("nothing_to_do", [timed(command) for _ in range(num_runs)]),
    }


def measure_verifying(root: Path) -> dict[str, Any]:
    """Re-hashes large objects on one thread; the rate is a CPU second's."""
    store = Store.open(root)
    for _ in range(LARGE_OBJECTS):
        store.objects.put_bytes(os.urandom(1 << 20) * (LARGE_BYTES >> 20))
    before = time.process_time()
    report = check_store(store, 1)
    return {"verify_bytes": report.object_bytes, "verify_cpu_seconds": time.process_time() - before}


def timed(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process that must find nothing to do."""
    used, started = _child_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall = time.perf_counter() - started
    assert done.stdout == "cache: nothing to do\n", done.stdout
    return wall, _child_seconds() - used


def make_store(folder: Path, num_entries: int) -> Manifest:
    """Records what builds of `num_entries` entries would have."""
    store, spec, target = Store.open(folder / "store"), parse_spec(SPEC, folder), probe()
    entries = tuple(PromptEntry(1 + number // 100, 1 + number % 100, 0) for number in range(num_entries))
    real, os.fsync = os.fsync, lambda _: None  # A hundred thousand of them would take minutes.
    try:
        for entry in entries:
            _record_entry(store, entry, ProgramKeys(spec, target).of(entry))
    finally:
        os.fsync = real
    return Manifest(spec, entries)


def _record_entry(store: Store, entry: PromptEntry, key: Any) -> None:
    units = {}
    for kind in ("embedding", "layer", "head"):
        text = f"{kind} of {entry}"
        unit = unit_key(text, probe())
        units[unit.hex] = UnitSource(text=str(store.objects.put_bytes(text.encode())), label=text)
        artifact = str(store.objects.put_bytes(unit.hex.encode()))
        row = {"artifact": {"unit.so": artifact}, "label": text, "components": dict(unit.components)}
        numbers = dict.fromkeys(("compile_seconds", "cpu_seconds", "max_abs_error", "tolerance"), 1.0)
        record(store, unit.hex, UnitRow.model_validate({**row, **numbers}))
    program = str(store.objects.put_bytes(str(entry).encode()))
    record(store, key.hex, ProgramRow(program=program, units=units, components=dict(key.components)))


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _spreads(name: str, samples: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        f"{name}_seconds": Spread(tuple(wall for wall, _ in samples)).json(),
        f"{name}_cpu_seconds": Spread(tuple(cpu for _, cpu in samples)).json(),
    }


def measure_rebuild(args: argparse.Namespace) -> None:
    """Measures a real spec whose build has nothing to do; writes. Exits with an error where torch was imported."""
    machine, spec = harness.environment(), args.spec.resolve()
    store = ("--store", str(args.store.resolve()))
    with tempfile.TemporaryDirectory(prefix="aotgaudi-bench-") as folder:
        rebuild = ["build", str(spec), "-o", str(Path(folder, "bundle")), *store]
        plan = json.loads(harness.run(harness.command("build", "plan", spec, *store, "--json"))[1])
        if plan["trace"] or plan["compile"]:
            sys.exit(f"{spec.name} is not built in that store; run: aotgaudi build {spec.name} --store STORE")
        harness.run(harness.command(*rebuild))  # Seals the bundle; the timed runs find everything done.
        commands = {"build SPEC, nothing to do": rebuild}
        for label, path in (("build manifest SPEC", spec), ("build manifest (large)", args.large_spec)):
            if path is not None:
                out = str(Path(folder, "manifest.json"))
                commands[label] = ["build", "manifest", str(path.resolve()), "-o", out]
        measured = {
            label: (
                Spread(tuple(harness.run(harness.command(*words))[0] for _ in range(args.runs))),
                _heavy_imports(words),
            )
            for label, words in commands.items()
        }
    targets = (NOTHING_TO_DO_SECONDS, MANIFEST_SECONDS, MANIFEST_SECONDS)
    rows = tuple(
        (label, f"{spread.text(3)} s", verdict(spread.median, target), ", ".join(imported) or "none")
        for (label, (spread, imported)), target in zip(measured.items(), targets, strict=False)
    )
    values = {
        label: {"seconds": spread.json(), "heavy_modules": imported}
        for label, (spread, imported) in measured.items()
    }
    columns = ("command", "median (min to max)", "target", f"imported of {', '.join(HEAVY)}")
    note = f"{args.runs} runs of each, whole process."
    harness.finish("rebuild", args, machine, values, [Table("Nothing to do", columns, rows, note)])
    if any("torch" in imported for _, imported in measured.values()):
        sys.exit("torch was imported")


def _heavy_imports(words: list[str]) -> list[str]:
    """Runs the command line in a process, and returns which heavy modules that imported."""
    text = harness.run([sys.executable, "-c", IMPORTED, *words])[1]
    found: list[str] = json.loads(text.splitlines()[-1])
    return found


def _table(result: dict[str, Any]) -> Table:
    seconds = result["nothing_to_do_seconds"]["median"]
    rate = result["verify_bytes"] / result["verify_cpu_seconds"]
    rows = (
        (
            f"no-op `build cache`, {result['num_entries']} entries",
            f"{seconds:.2f} s",
            verdict(seconds, NOTHING_TO_DO_SECONDS),
        ),
        ("the same, CPU", f"{result['nothing_to_do_cpu_seconds']['median']:.2f} s", ""),
        ("the same without an index", f"{result['rescan_seconds']['median']:.2f} s", ""),
        (
            "verification, one core",
            f"{rate / 1e9:.2f} GB/s",
            verdict(rate / 1e9, VERIFY_BYTES_A_SECOND / 1e9, at_least=True),
        ),
    )
    return Table("Store", ("what", "median", "target"), rows, "Whole processes, page cache warm.")


if __name__ == "__main__":
    main()
