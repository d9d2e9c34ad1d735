"""``aotgaudi build cache``: compiles what is missing into the store."""

from __future__ import annotations

import json
from pathlib import Path

import click

from aotgaudi.atomicfile import write_atomic
from aotgaudi.build.executor import BuildOutcome, Executor
from aotgaudi.bundle.receipt import dumps as dump_receipt
from aotgaudi.cli.options import jobs_option, load_manifest_or_spec, refuse_unwritable, store_option
from aotgaudi.cli.progress import StopRequest, progress_display
from aotgaudi.errors import BuildInterruptedError, CompileError, ManifestError
from aotgaudi.manifest.entries import Entry
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.pipeline import make_receipt, plan_manifest
from aotgaudi.store.store import Store


@click.command("cache")
@click.argument("manifest_path", metavar="MANIFEST", type=click.Path(path_type=Path))
@store_option
@jobs_option
@click.option("--entry", "entry_ids", multiple=True, metavar="ID", help="Only this entry (repeatable).")
@click.option("--receipt", type=click.Path(path_type=Path), metavar="FILE", help="Write the receipt there.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def build_cache(
    manifest_path: Path,
    store_root: Path,
    jobs: int,
    entry_ids: tuple[str, ...],
    receipt: Path | None,
    as_json: bool,
) -> None:
    """Compile what MANIFEST (or a spec) lacks into the store. Stops cleanly, and goes on where it stopped."""
    manifest = load_manifest_or_spec(manifest_path)
    if receipt:
        refuse_unwritable(receipt)
    store = Store.open(store_root)
    entries = select_entries(manifest, entry_ids)
    outcome = compile_missing(manifest, store, jobs, entries)
    if receipt:
        write_atomic(receipt, dump_receipt(make_receipt(manifest, plan_manifest(manifest, store, entries))))
    click.echo(json.dumps(summary(outcome), indent=2) if as_json else describe(outcome))


def select_entries(manifest: Manifest, entry_ids: tuple[str, ...]) -> tuple[Entry, ...]:
    """Returns the named entries, or all. Raises ManifestError for an id that the manifest lacks."""
    if not entry_ids:
        return manifest.entries
    by_id = {entry.id: entry for entry in manifest.entries}
    unknown = [entry_id for entry_id in entry_ids if entry_id not in by_id]
    if unknown:
        raise ManifestError(f"the manifest has no entry {unknown[0]}")
    return tuple(by_id[entry_id] for entry_id in entry_ids)


def compile_missing(manifest: Manifest, store: Store, jobs: int, entries: tuple[Entry, ...]) -> BuildOutcome:
    """Runs the plan with a progress display.

    Raises CompileError when units failed, BuildInterruptedError when it was asked to stop.
    """
    plan = plan_manifest(manifest, store, entries)
    if plan.is_complete:
        return BuildOutcome(num_traced=0, compiled=(), failures=(), seconds=0.0, interrupted=False)
    with progress_display() as show, StopRequest().listening() as stop:
        outcome = Executor(store, jobs, should_stop=stop, on_progress=show).run(plan, manifest.spec)
    if outcome.interrupted:
        failed = f" and {len(outcome.failures)} jobs failed" if outcome.failures else ""
        raise BuildInterruptedError(
            f"stopped at a unit boundary with {len(outcome.compiled)} units done{failed};"
            " resumable: run the same command again"
        )
    _raise_failures(outcome)
    return outcome


def describe(outcome: BuildOutcome) -> str:
    """One line for people."""
    if not outcome.compiled and not outcome.num_traced:
        return "cache: nothing to do"
    cpu = sum(row.cpu_seconds for row in outcome.compiled)
    return (
        f"cache: {len(outcome.compiled)} units compiled and checked, {outcome.num_traced} programs traced "
        f"in {outcome.seconds:.1f} s ({cpu:.0f} CPU seconds of compiling)"
    )


def summary(outcome: BuildOutcome) -> dict[str, object]:
    """The outcome as a JSON value; seconds are wall-clock."""
    return {
        "num_traced": outcome.num_traced,
        "num_compiled": len(outcome.compiled),
        "seconds": outcome.seconds,
        "units": [
            {
                "label": row.label,
                "compile_seconds": row.compile_seconds,
                "cpu_seconds": row.cpu_seconds,
                "max_abs_error": row.max_abs_error,
                "tolerance": row.tolerance,
            }
            for row in outcome.compiled
        ],
    }


def _raise_failures(outcome: BuildOutcome) -> None:
    if not outcome.failures:
        return
    rows = [
        f"  {failure.label}: {failure.message}\n    log: {failure.log_path}" for failure in outcome.failures
    ]
    num_jobs = len(outcome.failures) + len(outcome.compiled) + outcome.num_traced
    head = f"{len(outcome.failures)} of {num_jobs} jobs failed; the others are in the store"
    raise CompileError("\n".join([head, *rows]))
