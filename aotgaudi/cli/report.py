"""``aotgaudi report``: a spec, a manifest or a bundle on one page that needs no network."""

from __future__ import annotations

import json
from pathlib import Path

import click

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.cli.manifests import planned_target_option
from aotgaudi.cli.options import StorePlace, json_option, path_argument, path_option, store_options
from aotgaudi.cli.show import refuse_unwritable
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.engine.scheduler import UncoveredStepError
from aotgaudi.errors import SpecError
from aotgaudi.files import write_atomic
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec
from aotgaudi.report.compute import (
    Given,
    Inventory,
    Report,
    TracedSteps,
    inventory_of_bundle,
    inventory_of_plan,
    report_of,
    steps_of_trace,
)
from aotgaudi.report.page import report_page
from aotgaudi.store.store import Store
from aotgaudi.traffic.cost import WorkModel, device_of
from aotgaudi.traffic.trace import read_trace

_MOST_PLANNED = 100_000
"""For more entries we do not look up which are built, because that takes longer than everything else."""


@click.command()
@path_argument("subject", metavar="BUNDLE|MANIFEST|SPEC")
@path_option(
    "-o",
    "--output",
    dir_okay=False,
    metavar="FILE",
    help="The page  [default: report.html; with --json none]",
)
@path_option(
    "--trace",
    "trace_path",
    metavar="FILE",
    help="Compute padding from these requests, as CSV or JSON lines.",
)
@store_options
@planned_target_option
@json_option("Print what the page shows as JSON.")
def report(
    subject: Path,
    output: Path | None,
    trace_path: Path | None,
    place: StorePlace,
    described: Target | None,
    as_json: bool,
) -> None:
    """Show a spec, a manifest or a bundle on one page: a file that needs no network, and no other file.

    The page shows coverage, the buckets and how much steps are padded, and units with sizes and times. Exits with 0
    whatever it finds. If --store has records, they say what is built and how long it took; nothing is written there.
    """
    if not subject.exists():
        raise SpecError(str(subject), "there is no such file", "a bundle, a manifest or a spec (.toml)")
    page = output if as_json else output or Path("report.html")
    if page is not None:
        refuse_unwritable(page, subject, trace_path)
    store = place.open(create=False) if place.root.is_dir() else None
    found = report_of(_given(subject, trace_path, store, described))
    if as_json:
        click.echo(json.dumps(found.document, indent=2))
    if page is not None:
        data = report_page(found).encode()
        write_atomic(page, data)
        click.echo(_written(page, data, found), err=as_json)


def _written(page: Path, data: bytes, found: Report) -> str:
    document = found.document
    state = "every step has an entry" if document["coverage"]["closed"] else document["result"]
    return f"{page}: {len(data):,} bytes; {document['num_entries']:,} entries, {state}"


def _given(path: Path, trace_path: Path | None, store: Store | None, described: Target | None) -> Given:
    inventory, unknown, kind = None, None, "bundle"
    if path.is_dir():
        bundle = open_bundle(path)
        bundle.require_programs()
        manifest, inventory = bundle.manifest, inventory_of_bundle(bundle, store)
    else:
        kind = "spec" if path.suffix == ".toml" else "manifest"
        manifest = load_manifest_or_spec(path)
        inventory, unknown = _planned(manifest, store, described)
    traced, untraced = (None, None) if trace_path is None else _traced(manifest, trace_path)
    return Given(
        path=str(path),
        kind=kind,
        manifest=manifest,
        inventory=inventory,
        unknown=unknown,
        traced=traced,
        untraced=untraced,
    )


def _traced(manifest: Manifest, path: Path) -> tuple[TracedSteps | None, str | None]:
    """Returns a trace's steps, or why it cannot be replayed. A manifest with a hole is reported all the same."""
    trace, device = read_trace(path), device_of(manifest.spec)
    model = WorkModel.of(manifest.spec, device)
    try:
        return steps_of_trace(str(path), trace, manifest, model, device.source), None
    except UncoveredStepError as error:
        return None, f"a step of it, {error.needed}, has no entry"


def _planned(
    manifest: Manifest, store: Store | None, described: Target | None
) -> tuple[Inventory | None, str | None]:
    """Returns what the store has, or why that is not known."""
    if store is None:
        return None, "there is no store (--store), and this is no bundle"
    if len(manifest.entries) > _MOST_PLANNED:
        return None, f"it is not looked up for more than {_MOST_PLANNED:,} entries (aotgaudi build plan)"
    try:
        return inventory_of_plan(plan_manifest(manifest, store, described=described)), None
    except SpecError as error:
        return None, str(error)
