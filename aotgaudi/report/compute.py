"""Computes a report of a spec, a manifest or a bundle: what is built, the steps of a trace, and all numbers. Shows nothing.

A bundle holds no times (docs/adr/0010-bundle-and-trust.md). They are in the records of the store that built it, and are
looked up if that store is available. A bundle's programs are verified as they are read. Its units are not read. The steps of
a trace come from a replay through the engine's scheduler.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.receipt import SealedUnit
from aotgaudi.compile.keys import UnitRow, read_rows
from aotgaudi.compile.plan import Plan
from aotgaudi.entries import ENTRY_KINDS, Entry, PromptEntry, StepEntry
from aotgaudi.errors import CorruptError, ManifestError, NotWarmError, SpecError
from aotgaudi.manifest.coverage import reachable_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.summary import Summary, coverage_document
from aotgaudi.report.heat_map import HeatMap, Use, decode_map, prompt_map
from aotgaudi.store.store import Store
from aotgaudi.traffic.cost import WorkModel
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace

_MOST_LOST = 5


# What is built


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that is built.

    `programs`: the entries of each program that can run, and the keys of its units. `records`: the store's records of units.
    `lost`: the programs that cannot be read, in words.
    """

    source: Literal["bundle", "store"]
    programs: tuple[tuple[tuple[Entry, ...], tuple[str, ...]], ...]
    units: Mapping[str, SealedUnit]
    records: Mapping[str, UnitRow]
    lost: tuple[str, ...] = ()

    @property
    def entries(self) -> frozenset[Entry]:
        """The entries with a program that can run."""
        return frozenset(entry for entries, _ in self.programs for entry in entries)


def inventory_of_bundle(bundle: Bundle, store: Store | None) -> Inventory:
    """Returns what a bundle of programs holds. Raises as `Bundle.manifest` does, and SpecError for a capture."""
    receipt = bundle.require_programs()
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in bundle.manifest.entries:
        if entry.id in receipt.programs:
            groups[str(receipt.programs[entry.id])].append(entry)
    programs, lost = [], []
    for entries in groups.values():
        try:
            programs.append((tuple(entries), bundle.program(entries[0].id).unit_keys()))
        except (NotWarmError, CorruptError, ManifestError) as error:
            lost.append(str(error))
    records = {} if store is None else read_rows(UnitRow, store, receipt.units)
    return Inventory("bundle", tuple(programs), receipt.units, records, tuple(lost))


def inventory_of_plan(plan: Plan) -> Inventory:
    """Returns the part of a plan that the store has already."""
    programs = tuple((state.entries, tuple(row.units)) for state, row in plan.complete)
    return Inventory("store", programs, plan.units, plan.units)


def inventory_document(found: Inventory) -> dict[str, Any]:
    """Returns units with sizes, reuse and times as a JSON value, the largest first. Seconds are None without a record."""
    programs: Counter[str] = Counter()
    entries: Counter[str] = Counter()
    first: dict[str, Entry] = {}
    for served, keys in found.programs:
        for key in keys:
            programs[key] += 1
            entries[key] += len(served)
            first.setdefault(key, served[0])
    units: list[dict[str, Any]] = []
    for key, unit in found.units.items():
        record = found.records.get(key)
        units.append(
            {
                "key": key,
                "label": record.label if record else str(first.get(key, "of no entry")),
                "size_bytes": sum(digest.size_bytes for digest in unit.artifact.values()),
                "num_programs": programs[key],
                "num_entries": entries[key],
                "compile_seconds": record.compile_seconds if record else None,
            }
        )
    units.sort(key=lambda unit: (-unit["size_bytes"], unit["label"], unit["key"]))
    timed = [unit["compile_seconds"] for unit in units if unit["compile_seconds"] is not None]
    return {
        "source": found.source,
        "num_programs": len(found.programs),
        "num_units": len(units),
        "size_bytes": sum(unit["size_bytes"] for unit in units),
        "num_timed": len(timed),
        "compile_seconds": round(sum(timed), 3),
        "units": units,
    }


# The steps of a trace


@dataclass(frozen=True)
class TracedSteps:
    """A trace's steps: prompts by (context blocks, row), decodes by (batch size, blocks). `document` says it in JSON."""

    document: Mapping[str, Any]
    prompts: Mapping[tuple[int, int], Use]
    decodes: Mapping[tuple[int, int], Use]


def steps_of_trace(path: str, trace: Trace, manifest: Manifest, model: WorkModel, basis: str) -> TracedSteps:
    """Returns the steps that the server of a manifest forms for a trace that was read from `path`.

    `basis` says where the device's rates in `model` come from.

    Raises:
        SpecError: No request of the trace fits the limits, or the manifest has no prompts and decodes.
        UncoveredStepError: The manifest has a hole, and a step hit it.
    """
    spec = manifest.spec
    table = BucketTable.from_entries((*manifest.of_kind("prompt"), *manifest.of_kind("decode")))
    if not table.prompt or not table.decode:
        raise SpecError("--trace", "needs prompt and decode entries, and there are none", "leave it out")
    replayed = replay(trace, spec.limits, table, model.seconds, spec.scheduler.policy)
    prompts: defaultdict[tuple[int, int], Use] = defaultdict(Use)
    decodes: defaultdict[tuple[int, int], Use] = defaultdict(Use)
    used: set[StepEntry] = set()
    row_of = reachable_of(spec).prompts.row_of
    for (needs, entry), count in replayed.steps.items():
        use = Use(count, count * model.work(needs), count * model.work(entry))
        used.add(entry)
        if isinstance(needs, PromptEntry):
            prompts[needs.num_ctx_blocks, row_of(needs.query_len)] += use
        else:
            decodes[needs.batch_size, needs.num_blocks] += use
    document = {
        "path": path,
        "basis": basis,
        "num_requests": replayed.num_requests,
        "num_refused": replayed.num_refused,
        "num_shortened": replayed.num_shortened,
        "num_preemptions": replayed.num_preemptions,
        "seconds": round(replayed.seconds, 3),
        "num_steps": replayed.num_steps,
        "num_entries": len(table.prompt) + len(table.decode),
        "num_entries_used": len(used),
        "factor": sum((*prompts.values(), *decodes.values()), Use()).factor,
    }
    return TracedSteps(document, prompts, decodes)


# The report


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
