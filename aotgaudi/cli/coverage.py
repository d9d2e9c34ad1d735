"""``aotgaudi coverage``: has every step that the server can form an entry, and how much padding does it cost?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import Padding, decode_padding, prompt_padding
from aotgaudi.bucketing.proof import (
    AddedEntry,
    Coverage,
    PhaseCoverage,
    ReachableSteps,
    closing_entries,
    uncovered,
)
from aotgaudi.bucketing.reachable import counted
from aotgaudi.cli.manifest_report import server_document, server_lines
from aotgaudi.cli.options import json_option
from aotgaudi.cli.show import emit
from aotgaudi.cli.target_option import planned_target_option, refuse_other_target
from aotgaudi.errors import CoverageError
from aotgaudi.manifest.coverage import coverage_of, described_scheduler, left_out, reachable_of
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec

_SHOWN = 12


@click.command("coverage")
@click.argument("manifest_path", metavar="MANIFEST", type=click.Path(path_type=Path))
@planned_target_option
@json_option("Print the result as JSON.")
def coverage(manifest_path: Path, described: Target | None, as_json: bool) -> None:
    """Prove that every step that can be formed under the limits of MANIFEST (or a spec) has an entry.

    The steps are those of the scheduler that the spec describes. Where that is vLLM's, the table that the server makes
    for itself is judged as well, and what is left out of the proof is named.

    Exits with 0 if every step has an entry in the manifest; else exits with 7 and prints the holes and a smallest
    counterexample. What the server's own table lacks does not change the exit code. No entry depends on --target: it is
    checked to be one for MANIFEST, and changes nothing.
    """
    manifest = load_manifest_or_spec(manifest_path)
    refuse_other_target(described, manifest.spec)
    result = coverage_of(manifest)
    document = _document(manifest, result)
    emit(document, as_json, _lines(manifest_path, document))
    if not result.is_closed:
        raise CoverageError(f"{manifest_path}: {result}")


def _document(manifest: Manifest, result: Coverage) -> dict[str, Any]:
    spec, table, steps = (
        manifest.spec,
        BucketTable.from_entries(manifest.entries),
        reachable_of(manifest.spec),
    )
    holes = uncovered(steps, table) if any(phase.kind == "prompt" for phase in result.phases) else ()
    closed = spec.bucketing.model_copy(update={"coverage": "closed"})
    adds = () if result.is_closed else closing_entries(steps, closed, table)
    return {
        "id": manifest.id,
        "model": spec.model.name,
        "mode": spec.bucketing.coverage,
        "scheduler": described_scheduler(spec),
        "closed": result.is_closed,
        "phases": _phases(result.phases, steps, table),
        "holes": [str(hole) for hole in holes],
        "smallest": dataclasses.asdict(result.smallest) if result.smallest else None,
        "mend": None if result.is_closed else _mend(manifest, adds),
        "closing_entries": [str(entry) for entry in adds],
        "not_proved": list(result.unproved),
        "left_out": list(left_out(spec)),
        "server_table": server_document(spec),
    }


def _phases(
    phases: tuple[PhaseCoverage, ...], steps: ReachableSteps, table: BucketTable
) -> list[dict[str, Any]]:
    padding = {
        "prompt": prompt_padding(steps.prompts, table),
        "decode": decode_padding(steps.decodes, table),
    }
    return [{**dataclasses.asdict(phase), "padding": _padding(padding.get(phase.kind))} for phase in phases]


def _padding(padding: Padding | None) -> dict[str, Any] | None:
    if padding is None:
        return None
    rounded = {name: round(getattr(padding, name), 4) for name in ("mean", "error", "worst")}
    return {**dataclasses.asdict(padding), **rounded}


def _mend(manifest: Manifest, adds: tuple[AddedEntry, ...]) -> str:
    if manifest.spec.bucketing.strategy == "unified":
        return (
            "another bucketing.strategy: our engine forms prompt and decode steps, no unified ones, and of vLLM's"
            " nothing is proved"
        )
    if manifest.spec.bucketing.coverage == "closed":
        return "enumerate it anew: aotgaudi build manifest SPEC"
    entries = f"{len(adds):,} {'entry' if len(adds) == 1 else 'entries'}"
    return f'coverage = "closed" in the [bucketing] of the spec adds {entries}'


def _lines(path: Path, document: Mapping[str, Any]) -> Iterator[str]:
    state = "closed" if document["closed"] else "has holes" if document["smallest"] else "not proved"
    yield f'{path}: {state} (coverage = "{document["mode"]}")'
    if document["scheduler"] != "aotgaudi":
        yield f"  the steps are those of {document['scheduler']}"
    if document["phases"]:
        yield f"  {'':<11}{'can be formed':>18}{'no entry':>18}{'padding: mean':>16}{'worst':>10}"
    elif document["closed"]:
        yield "  nothing has to be warm: the target runs without graphs"
    yield from map(_phase_line, document["phases"])
    yield from _listed("no entry for", document["holes"])
    if document["smallest"]:
        yield f"the smallest of them: {document['smallest']['text']}"
    if document["mend"]:
        yield f"what mends it: {document['mend']}"
    yield from _listed("which then has", document["closing_entries"])
    yield from server_lines(document["server_table"])
    if document["not_proved"]:
        yield f"of {', '.join(document['not_proved'])} entries nothing is proved"
    yield from (f"left out of the proof: {text}" for text in document["left_out"])


def _phase_line(phase: Mapping[str, Any]) -> str:
    reachable, holes = phase["num_reachable"], phase["num_uncovered"]
    missing = f"{holes:,}" + (f" ({100 * holes / reachable:.1f} %)" if holes else "")
    line = f"  {phase['kind']:<11}{reachable:>12,} {phase['unit']:<5}{missing:>18}"
    if phase["padding"] is None:
        return line
    mean, worst = phase["padding"]["mean"], phase["padding"]["worst"]
    error = phase["padding"]["error"]
    sampled = f", mean within {error:.2f}" if error else ""
    return f"{line}{mean:>16.2f}{worst:>10.2f}  {_step(phase)}{sampled}"


def _step(phase: Mapping[str, Any]) -> str:
    """The step of the worst padding, in words."""
    batch_size, query_len, blocks = phase["padding"]["worst_step"]
    if phase["kind"] == "prompt":
        return f"{counted(query_len, 'token')} after {counted(blocks, 'block')}"
    return f"{counted(batch_size, 'sequence')} over {counted(blocks, 'block')}"


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    if not lines:
        return
    yield f"{title}:"
    yield from (f"  {line}" for line in lines[:_SHOWN])
    if len(lines) > _SHOWN:
        yield f"  and {len(lines) - _SHOWN:,} more (--json lists all)"
