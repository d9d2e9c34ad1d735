"""A build with nothing to do, and the enumeration alone: whole processes, and proof that torch stays out."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from harness import Spread, Table, verdict

REBUILD_TARGET_SECONDS, MANIFEST_TARGET_SECONDS = 1.0, 0.3
HEAVY = ("torch", "transformers", "numpy", "sympy")

WITNESS = f"""
import json, sys
from aotgaudi.cli.main import cli
try:
    cli.main(sys.argv[1:], prog_name="aotgaudi")
except SystemExit as end:
    code = end.code or 0
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
"""Runs the command line in the process, and tells which heavy modules that has imported."""


def main() -> None:
    """Measures, prints, writes."""
    args = _arguments()
    machine = harness.environment()
    spec = args.spec.resolve()
    with tempfile.TemporaryDirectory(prefix="aotgaudi-bench-") as folder:
        out = Path(folder)
        rebuild = ["build", str(spec), "-o", str(out / "bundle"), "--store", str(args.store.resolve())]
        enumerate_ = ["build", "manifest", str(spec), "-o", str(out / "manifest.json")]
        _require_built(spec, args.store)
        harness.run(harness.command(*rebuild))  # Seals the bundle; the timed runs find everything done.
        commands = {"build SPEC, nothing to do": rebuild, "build manifest SPEC": enumerate_}
        if args.large_spec:
            options = ["-o", str(out / "large.manifest.json")]
            commands["build manifest (large)"] = [
                "build",
                "manifest",
                str(args.large_spec.resolve()),
                *options,
            ]
        measured = {label: _measure(arguments, args.runs) for label, arguments in commands.items()}
    targets = (REBUILD_TARGET_SECONDS, MANIFEST_TARGET_SECONDS, MANIFEST_TARGET_SECONDS)
    rows = tuple(
        (label, f"{spread.text(3)} s", verdict(spread.median, target), ", ".join(imported) or "none")
        for (label, (spread, imported)), target in zip(measured.items(), targets, strict=False)
    )
    values: dict[str, Any] = {
        label: {"seconds": spread.json(), "heavy_modules": imported}
        for label, (spread, imported) in measured.items()
    }
    columns = ("command", "median (min to max)", "target", f"imported of {', '.join(HEAVY)}")
    note = f"{args.runs} runs of each, whole process."
    harness.finish("rebuild", args, machine, values, [Table("Nothing to do", columns, rows, note)])
    if any("torch" in imported for _, imported in measured.values()):
        sys.exit("torch was imported")


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="a spec that is built")
    parser.add_argument("--store", type=Path, required=True, help="the store that has it")
    parser.add_argument("--large-spec", type=Path, help="a spec with a large table, enumerated only")
    parser.add_argument("--runs", type=int, default=9)
    return parser.parse_args()


def _require_built(spec: Path, store: Path) -> None:
    options = ["--store", str(store.resolve()), "--json"]
    plan = json.loads(harness.run(harness.command("build", "plan", spec, *options))[1])
    if plan["trace"] or plan["compile"]:
        sys.exit(
            f"{spec.name} is not built in that store ({len(plan['trace'])} programs to trace, "
            f"{len(plan['compile'])} units to compile); run: aotgaudi build {spec.name} --store STORE"
        )


def _measure(arguments: list[str], runs: int) -> tuple[Spread, list[str]]:
    """Seconds of the process, and the heavy modules that it imports (told by one more, uncounted run)."""
    _, text = harness.run([sys.executable, "-c", WITNESS, *arguments])
    code, imported = json.loads(text.splitlines()[-1])
    if code:
        sys.exit(f"failed with {code}: {' '.join(arguments)}\n{text}")
    return Spread(tuple(harness.run(harness.command(*arguments))[0] for _ in range(runs))), imported


if __name__ == "__main__":
    main()
