"""``aotgaudi report``: a spec, a manifest or a bundle on one page that needs no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from aotgaudi import __version__
from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.cli.options import (
    json_option,
    memory_budget_option,
    path_argument,
    path_option,
)
from aotgaudi.cli.show import refuse_unwritable
from aotgaudi.cli.store_options import StorePlace, store_options
from aotgaudi.cli.target_option import planned_target_option
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.errors import SpecError
from aotgaudi.files import write_atomic
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec
from aotgaudi.report.compute import Given, report_of
from aotgaudi.report.holdings import Holdings, holdings_of_bundle, holdings_of_plan, read_build_time
from aotgaudi.report.page import report_page
from aotgaudi.report.values import Report
from aotgaudi.store.store import Store
from aotgaudi.traffic.cost import WorkModel, device_of

_REPORTER = f"aotgaudi {__version__}"

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
    metavar="FILE",
    help="Compute padding from these requests, as CSV or JSON lines.",
)
@path_option(
    "--build",
    "build_path",
    metavar="FILE",
    help="What `build --json`, or `build cache --json`, printed: the page shows where the time of that build went.",
)
@memory_budget_option
@store_options
@planned_target_option
@json_option("Print what the page shows as JSON.")
def report(
    subject: Path,
    output: Path | None,
    trace: Path | None,
    build_path: Path | None,
    memory_budget: int | None,
    place: StorePlace,
    described: Target | None,
    as_json: bool,
) -> None:
    """Show a spec, a manifest or a bundle on one page: a file that needs no network, and no other file.

    The steps that can be formed and the entries for them, holes and their witnesses, padding, units by size, time and
    reuse, memory, keys, and what an upgrade would cost. Exits with 0 whatever it finds. Where --store has records, they say
    what is built and how long it took; nothing is written there.
    """
    if not subject.exists():
        raise SpecError(str(subject), "there is no such file", "a bundle, a manifest or a spec (.toml)")
    page = output if as_json else output or Path("report.html")
    if page is not None:
        refuse_unwritable(page, subject, build_path, trace)
    given = _given(subject, memory_budget, place, described)
    if build_path is not None:
        given = replace(given, build_time=read_build_time(build_path, given.manifest))
    if trace is not None:
        given = _traced(given, trace)
    found = report_of(given)
    if as_json:
        click.echo(found.model_dump_json(by_alias=True, indent=2))
    if page is not None:
        data = report_page(found).encode()
        write_atomic(page, data)
        click.echo(_written(page, data, found), err=as_json)


def _written(page: Path, data: bytes, found: Report) -> str:
    state = "every step has an entry" if found.coverage.is_closed else found.coverage.result
    return f"{page}: {len(data):,} bytes; {found.entries.num_entries:,} entries, {state}"


def _given(path: Path, budget: int | None, place: StorePlace, described: Target | None) -> Given:
    store = place.open(create=False) if place.root.is_dir() else None
    if path.is_dir():
        bundle = open_bundle(path)
        bundle.require_programs()
        return Given(
            path=str(path),
            kind="bundle",
            manifest=bundle.manifest,
            reporter=_REPORTER,
            bundle=bundle,
            holdings=holdings_of_bundle(bundle, store),
            budget_bytes=budget,
        )
    manifest = load_manifest_or_spec(path)
    holdings, unknown = _planned(manifest, store, described)
    return Given(
        path=str(path),
        kind="spec" if path.suffix == ".toml" else "manifest",
        manifest=manifest,
        reporter=_REPORTER,
        holdings=holdings,
        unknown=unknown,
        budget_bytes=budget,
    )


def _traced(given: Given, path: Path) -> Given:
    """Returns `given` with a trace, or with why it cannot be replayed. A manifest with a hole is reported all the same."""
    from aotgaudi.engine.scheduler import UncoveredStepError
    from aotgaudi.report.traffic import steps_of_trace
    from aotgaudi.traffic.trace import read_trace

    requests, device = read_trace(path), device_of(given.manifest.spec)
    model = WorkModel.of(given.manifest.spec, device)
    basis = f"an estimate by what a device can do at most ({device.source})"
    try:
        traced = steps_of_trace(str(path), requests, given.manifest, model, basis)
    except UncoveredStepError as error:
        return replace(given, untraced=f"a step of it, {error.needed}, has no entry")
    return replace(given, traced=traced)


def _planned(
    manifest: Manifest, store: Store | None, described: Target | None
) -> tuple[Holdings | None, str | None]:
    """Returns what the store has, or why that is not known."""
    if store is None:
        return None, "there is no store (--store), and this is no bundle"
    if len(manifest.entries) > _MOST_PLANNED:
        return None, f"it is not looked up for more than {_MOST_PLANNED:,} entries (aotgaudi build plan)"
    try:
        return holdings_of_plan(plan_manifest(manifest, store, described=described), manifest.spec), None
    except SpecError as error:
        return None, str(error)
