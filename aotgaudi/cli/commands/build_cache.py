"""``aotgaudi build cache``: compiles what is missing into the store."""

from __future__ import annotations

import json
from pathlib import Path

import click

from aotgaudi.atomicfile import write_atomic
from aotgaudi.build.executor import BuildOutcome
from aotgaudi.build.plan import remember_complete
from aotgaudi.build.recheck import recheck
from aotgaudi.bundle.receipt import dumps as dump_receipt
from aotgaudi.cli.options.common import load_manifest_or_spec, refuse_unwritable
from aotgaudi.cli.options.sample import check_document, check_options, describe_check, failure_of
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.cli.options.worker import WorkerPlace, worker_options
from aotgaudi.cli.show.progress import StopRequest, progress_display
from aotgaudi.entries import Entry
from aotgaudi.errors import BuildInterruptedError, CompileError, ManifestError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.pipeline import is_known_built, make_receipt, plan_manifest
from aotgaudi.store.store import Store

NOTHING_DONE = BuildOutcome(num_traced=0, compiled=(), failures=(), seconds=0.0, interrupted=False)


@click.command("cache")
@click.argument("manifest_path", metavar="MANIFEST", type=click.Path(path_type=Path))
@store_options
@worker_options
@click.option("--entry", "entry_ids", multiple=True, metavar="ID", help="Only this entry (repeatable).")
@click.option("--receipt", type=click.Path(path_type=Path), metavar="FILE", help="Write the receipt there.")
@check_options
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def build_cache(
    manifest_path: Path,
    place: StorePlace,
    workers: WorkerPlace,
    entry_ids: tuple[str, ...],
    receipt: Path | None,
    sample: int | None,
    as_json: bool,
) -> None:
    """Compile what MANIFEST (or a spec) lacks into the store. Stops cleanly, and goes on where it stopped.

    With --check it compiles some of what is there again, elsewhere, and exits with 4 when the bytes differ.
    """
    manifest = load_manifest_or_spec(manifest_path)
    if receipt and sample is not None:
        raise click.UsageError("--check builds nothing, so there is no --receipt to write")
    if receipt:
        refuse_unwritable(receipt)
    store = place.open()
    entries = select_entries(manifest, entry_ids)
    if sample is not None:
        _check(manifest, store, workers.num_local, entries, sample, as_json)
        return
    with store.in_use():
        outcome = compile_missing(manifest, store, workers, entries)
        if receipt:
            plan = plan_manifest(manifest, store, entries)
            write_atomic(receipt, dump_receipt(make_receipt(manifest, plan)))
    click.echo(json.dumps(summary(outcome), indent=2) if as_json else describe(outcome))


def _check(
    manifest: Manifest, store: Store, jobs: int, entries: tuple[Entry, ...], sample: int, as_json: bool
) -> None:
    with store.in_use():
        found = recheck(plan_manifest(manifest, store, entries), store, sample, jobs)
    failure = failure_of(found)
    if as_json:
        click.echo(json.dumps(check_document(found), indent=2))
    if failure is not None:
        raise failure
    if not as_json:
        click.echo(describe_check(found))


def select_entries(manifest: Manifest, entry_ids: tuple[str, ...]) -> tuple[Entry, ...]:
    """Returns the named entries, or all. Raises ManifestError for an id that the manifest lacks."""
    if not entry_ids:
        return manifest.entries
    by_id = {entry.id: entry for entry in manifest.entries}
    unknown = [entry_id for entry_id in entry_ids if entry_id not in by_id]
    if unknown:
        raise ManifestError(f"the manifest has no entry {unknown[0]}")
    return tuple(by_id[entry_id] for entry_id in entry_ids)


def compile_missing(
    manifest: Manifest, store: Store, workers: WorkerPlace, entries: tuple[Entry, ...]
) -> BuildOutcome:
    """Runs the plan with a progress display.

    Raises CompileError when units failed, BuildInterruptedError when it was asked to stop.
    """
    if is_known_built(manifest, store, entries):
        return NOTHING_DONE
    plan = plan_manifest(manifest, store, entries)
    if plan.is_complete:
        remember_complete(plan, store)
        return NOTHING_DONE
    store.require_writable()
    with progress_display() as show, StopRequest().listening() as stop:
        outcome = workers.executor(store, plan.target.backend, stop, show).run(plan, manifest.spec)
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
