"""Computes the report of a spec, a manifest or a bundle. Shows nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import Hole, PromptHole, close
from aotgaudi.bucketing.speculation import SpeculativeRun
from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import find_strategy
from aotgaudi.bundle.bundle import Bundle, read_signature
from aotgaudi.entries import ENTRY_KINDS, DecodeEntry, Entry, PromptEntry
from aotgaudi.gaudi.live_graphs import not_closed
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.summary import Summary
from aotgaudi.report.holdings import Holdings, built_of, upgrades_of
from aotgaudi.report.planes import EntryFacts, decode_plane, prompt_plane
from aotgaudi.report.traffic import TracedSteps
from aotgaudi.report.values import (
    BuildTime,
    ClosingEntry,
    Component,
    Entries,
    KindOfEntry,
    Origin,
    Phase,
    Plane,
    Report,
    ReportedCoverage,
    ReportedHole,
    Subject,
)

MOST_LISTED = 200
"""How many holes and closing entries are listed at most. All are counted."""

StepEntry = PromptEntry | DecodeEntry


@dataclass(frozen=True, kw_only=True)
class Given:
    """The inputs of a report. `reporter` is the name and version of the reporting program.

    `unknown` says why there are no holdings, and how to get them. `untraced` says why a trace was not replayed.
    """

    path: str
    kind: Literal["spec", "manifest", "bundle"]
    manifest: Manifest
    reporter: str = "aotgaudi"
    bundle: Bundle | None = None
    holdings: Holdings | None = None
    unknown: str | None = None
    traced: TracedSteps | None = None
    untraced: str | None = None
    build_time: BuildTime | None = None
    budget_bytes: int | None = None


@dataclass(frozen=True)
class _Steps:
    """The entries of prompts and decodes, and those that the public table lacks, as entry -> its witness, if it has one."""

    table: BucketTable
    closing: Mapping[StepEntry, tuple[int, ...] | None] = field(default_factory=dict)
    short: frozenset[StepEntry] = frozenset()

    def origin(self, entry: StepEntry) -> Origin:
        return "closing" if entry in self.closing else "short" if entry in self.short else "public"


def report_of(given: Given) -> Report:
    """Returns the report. Takes seconds for a manifest of a million entries. Raises nothing that making `given` did not."""
    summary = Summary(given.manifest, given.budget_bytes)
    steps = _steps(summary)
    warm = None if given.holdings is None else given.holdings.warm_entries
    return Report(
        subject=_subject(given),
        entries=_entries(summary, steps, given.holdings, warm),
        coverage=_coverage(summary, steps),
        planes=_planes(given, summary, steps, warm) if summary.proves_steps else (),
        trace=None if given.traced is None else given.traced.reported,
        built=None if given.holdings is None else built_of(given.holdings),
        build_time=given.build_time,
        memory=summary.memory,
        provenance=tuple(_provenance(given)),
        keys=_keys(given.holdings),
        upgrades=() if given.holdings is None else upgrades_of(given.holdings),
        warnings=tuple(summary.warnings),
        notes=tuple(_notes(given)),
    )


def _subject(given: Given) -> Subject:
    spec = given.manifest.spec
    return Subject(
        path=given.path,
        kind=given.kind,
        manifest_id=given.manifest.id,
        model=spec.model.name,
        backend=spec.target.backend,
        version=spec.bucketing.version,
        strategy=spec.bucketing.strategy,
    )


# Entries


def _steps(summary: Summary) -> _Steps:
    """Finds the entries that were added to the public table, and their reasons, by making that table again."""
    spec, table = summary.manifest.spec, summary.table
    bucketing = spec.bucketing
    if bucketing.strategy == "unified" or not table.prompt:
        return _Steps(table)
    if bucketing.coverage == "upstream" and not bucketing.short_queries:
        return _Steps(table)  # Then nothing was added.
    strategy = find_strategy(bucketing.version, bucketing.strategy)
    inputs = BucketingInputs.from_spec(spec.limits, bucketing)
    prompts = set(strategy.prompt_table(inputs))
    decodes = set(strategy.decode_table(inputs)) if table.decode else set()
    added_prompts = {e for e in table.prompt if (e.batch_size, e.query_len, e.num_ctx_blocks) not in prompts}
    added_decodes = {e for e in table.decode if (e.batch_size, e.query_len, e.num_blocks) not in decodes}
    if not added_prompts and not added_decodes:
        return _Steps(table)
    public = BucketTable(
        tuple(entry for entry in table.prompt if entry not in added_prompts),
        tuple(entry for entry in table.decode if entry not in added_decodes),
    )
    additions = close(summary.steps, bucketing.max_padding, public)
    witnesses = {addition.entry: addition.witness for addition in additions}
    short = {
        entry
        for entry in added_prompts
        if entry not in witnesses and entry.query_len in bucketing.short_queries
    }
    closing = sorted(added_prompts - short) + sorted(added_decodes)
    return _Steps(table, MappingProxyType({one: witnesses.get(one) for one in closing}), frozenset(short))


def _entries(
    summary: Summary, steps: _Steps, held: Holdings | None, warm: frozenset[Entry] | None
) -> Entries:
    manifest = summary.manifest
    kinds = tuple(
        KindOfEntry(
            kind=kind,
            num_entries=len(entries),
            num_warm=None if warm is None else sum(entry in warm for entry in entries),
            num_closing=sum(entry.kind == kind for entry in steps.closing),
            largest=str(summary.largest(kind)),
        )
        for kind in ENTRY_KINDS
        if (entries := manifest.of_kind(kind))
    )
    return Entries(
        num_entries=len(manifest.entries),
        num_warm=None if warm is None else sum(entry in warm for entry in manifest.entries),
        num_closing=len(steps.closing),
        num_programs=None if held is None else len(held.programs),
        kinds=kinds,
    )


# Coverage


def _coverage(summary: Summary, steps: _Steps) -> ReportedCoverage:
    proof, holes = summary.coverage, summary.holes
    return ReportedCoverage(
        mode=summary.manifest.spec.bucketing.coverage,
        scheduler=summary.scheduler,
        is_closed=proof.is_closed,
        result=str(proof),
        smallest=str(proof.smallest) if proof.smallest else None,
        phases=tuple(
            Phase(
                kind=phase.kind,
                unit=phase.unit,
                num_reachable=phase.num_reachable,
                num_uncovered=phase.num_uncovered,
            )
            for phase in proof.phases
        ),
        num_holes=len(holes),
        holes=tuple(map(_hole, holes[:MOST_LISTED])),
        num_closing=len(steps.closing),
        closing=tuple(
            ClosingEntry(entry=str(entry), witness=witness)
            for entry, witness in list(steps.closing.items())[:MOST_LISTED]
        ),
        unproved=proof.unproved,
        left_out=(*summary.left_out, *not_closed(summary.live_graphs)),
    )


def _hole(hole: Hole) -> ReportedHole:
    if isinstance(hole, PromptHole):
        kind, number = "prompt", hole.num_cells
    else:
        kind, number = "speculative" if isinstance(hole, SpeculativeRun) else "decode", hole.num_steps
    smallest = hole.smallest
    return ReportedHole(
        kind=kind, text=str(hole), num_uncovered=number, witness=smallest.text, shape=smallest.shape
    )


def _planes(
    given: Given, summary: Summary, steps: _Steps, warm: frozenset[Entry] | None
) -> tuple[Plane, ...]:
    reachable, traced = summary.steps, given.traced
    built = None if warm is None else BucketTable.from_entries(warm)

    def facts(entry: StepEntry) -> EntryFacts:
        return EntryFacts(steps.origin(entry), None if warm is None else entry in warm)

    prompts = prompt_plane(reachable.prompts, steps.table, facts, traced.prompts if traced else {}, built)
    if not reachable.decodes.generates:
        return (prompts,)
    return (
        prompts,
        decode_plane(reachable.decodes, steps.table, facts, traced.decodes if traced else {}, built),
    )


# Origins


def _provenance(given: Given) -> Iterator[Component]:
    yield Component(name="manifest", value=given.manifest.id)
    yield Component(name="reported by", value=given.reporter)
    bundle = given.bundle
    if bundle is None:
        return
    receipt = bundle.require_programs()
    yield Component(name="manifest.json", value=str(bundle.index.manifest))
    yield Component(name="receipt.json", value=str(bundle.index.receipt))
    yield Component(name="objects", value=f"{len(bundle.index.objects):,}")
    signed = read_signature(bundle.path) is not None
    yield Component(
        name="signature",
        value="there is one, which is not checked here (aotgaudi verify --trusted-key)" if signed else "none",
    )
    bound = (
        f"bound: {len(receipt.model)} files" if receipt.model else "not bound: any checkpoint of its model"
    )
    yield Component(name="model", value=bound)
    for name, value in receipt.builder.items():
        yield Component(name=f"built with {name}", value=value)


def _keys(held: Holdings | None) -> tuple[Component, ...]:
    """Returns the components that the keys of all programs share."""
    if held is None:
        return ()
    return tuple(Component(name=name, value=value) for name, value in held.keys.common)


def _notes(given: Given) -> Iterator[str]:
    if given.untraced is not None:
        yield f"the trace was not replayed: {given.untraced}"
    if given.traced is not None and given.manifest.spec.scheduler.engine != "aotgaudi":
        yield "the trace was replayed through the scheduler of aotgaudi's engine, which is not that of this spec"
    held = given.holdings
    if held is None:
        yield f"what is built is not known: {given.unknown}"
        return
    yield from _first(held.lost)
    if held.source == "bundle":
        yield "the bundle's units were not hashed again: aotgaudi verify does that"
    num_untimed = sum(key not in held.records for key in held.units)
    if num_untimed:
        yield (
            f"of {num_untimed:,} of {len(held.units):,} units no record says how long they took: records are in the"
            " store of the builder (--store)"
        )


def _first(texts: Iterable[str], most: int = 5) -> Iterator[str]:
    rows = list(texts)
    yield from rows[:most]
    if len(rows) > most:
        yield f"and {len(rows) - most:,} more"
