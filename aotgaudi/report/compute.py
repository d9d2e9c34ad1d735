"""Computes the report of a spec, a manifest or a bundle. Shows nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from aotgaudi.entries import ENTRY_KINDS
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.summary import Summary, coverage_document
from aotgaudi.report.heat_map import HeatMap, decode_map, prompt_map
from aotgaudi.report.inventory import Inventory, inventory_document
from aotgaudi.report.traffic import TracedSteps

_MOST_LOST = 5


@dataclass(frozen=True, kw_only=True)
class Given:
    """The inputs of a report. `path` is as the user gave it; `kind` is spec, manifest or bundle.

    `unknown` says why there is no inventory, and how to get it. `untraced` says why a trace was not replayed.
    """

    path: str
    kind: str
    manifest: Manifest
    inventory: Inventory | None = None
    unknown: str | None = None
    traced: TracedSteps | None = None
    untraced: str | None = None


@dataclass(frozen=True)
class Report:
    """What ``--json`` prints, and every number that the page shows. `heat_maps` are a part of it."""

    document: dict[str, Any]
    heat_maps: tuple[HeatMap, ...]


def report_of(given: Given) -> Report:
    """Returns the report. Takes seconds for a manifest of a million entries. Raises nothing that making `given` did not."""
    manifest, inventory = given.manifest, given.inventory
    summary, spec = Summary(manifest), manifest.spec
    built = None if inventory is None else inventory.entries
    heat_maps = _heat_maps(given, summary) if summary.proves_steps else ()
    kinds: list[dict[str, Any]] = [
        {
            "kind": kind,
            "num_entries": len(entries),
            "num_built": None if built is None else sum(entry in built for entry in entries),
            "largest": str(summary.largest(kind)),
        }
        for kind in ENTRY_KINDS
        if (entries := manifest.of_kind(kind))
    ]
    document = {
        "schema": "aotgaudi.report/1",
        "subject": {
            "path": given.path,
            "kind": given.kind,
            "manifest_id": manifest.id,
            "model": spec.model.name,
            "backend": spec.target.backend,
            "version": spec.bucketing.version,
            "strategy": spec.bucketing.strategy,
        },
        "result": str(summary.coverage),
        "num_entries": len(manifest.entries),
        "num_built": None if built is None else sum(row["num_built"] for row in kinds),
        "num_holes": len(summary.holes),
        "kinds": kinds,
        "coverage": coverage_document(summary),
        "heat_maps": [asdict(heat_map) for heat_map in heat_maps],
        "trace": None if given.traced is None else given.traced.document,
        "built": None if inventory is None else inventory_document(inventory),
        "warnings": list(summary.warnings),
        "notes": list(_notes(given)),
    }
    return Report(document, heat_maps)


def _heat_maps(given: Given, summary: Summary) -> tuple[HeatMap, ...]:
    steps, table, traced = summary.steps, summary.table, given.traced
    built = None if given.inventory is None else given.inventory.entries
    prompts = prompt_map(steps.prompts, table, built, traced.prompts if traced else None)
    return prompts, decode_map(steps.decodes, table, built, traced.decodes if traced else None)


def _notes(given: Given) -> Iterator[str]:
    if given.untraced is not None:
        yield f"the trace was not replayed: {given.untraced}"
    if given.traced is not None and given.manifest.spec.scheduler.engine != "aotgaudi":
        yield "the trace was replayed through the scheduler of aotgaudi's engine, which is not that of this spec"
    found = given.inventory
    if found is None:
        yield f"what is built is not known: {given.unknown}"
        return
    yield from found.lost[:_MOST_LOST]
    if len(found.lost) > _MOST_LOST:
        yield f"and {len(found.lost) - _MOST_LOST:,} more"
    if found.source == "bundle":
        yield "the bundle's units were not hashed again: aotgaudi verify does that"
    num_untimed = sum(key not in found.records for key in found.units)
    if num_untimed:
        yield (
            f"of {num_untimed:,} of {len(found.units):,} units no record says how long they took: records are in the"
            " store of the builder (--store)"
        )
