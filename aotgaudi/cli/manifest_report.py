"""What a manifest holds, for people and as JSON: entries, coverage, memory, warnings."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import Padding, decode_padding, prompt_padding
from aotgaudi.bucketing.proof import uncovered
from aotgaudi.bucketing.versions import skipped_lines
from aotgaudi.entries import ENTRY_KINDS, DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.cost import estimate_memory, find_explosion
from aotgaudi.manifest.coverage import (
    coverage_of,
    coverage_of_server,
    described_scheduler,
    left_out,
    reachable_of,
)
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def summarize(path: Path, manifest: Manifest, budget_bytes: int | None = None) -> dict[str, Any]:
    """Returns what a manifest holds as a JSON value; `budget_bytes`: for KV cache and step buffers."""
    by_kind = {kind: manifest.of_kind(kind) for kind in ENTRY_KINDS}
    memory = _memory(manifest, budget_bytes)
    return {
        "manifest": str(path),
        "id": manifest.id,
        "model": manifest.spec.model.name,
        "num_entries": {kind: len(entries) for kind, entries in by_kind.items()},
        "largest": {kind: str(max(entries, key=_size)) for kind, entries in by_kind.items() if entries},
        **_coverage(manifest),
        "memory": memory,
        "warnings": list(_warnings(manifest, memory)),
    }


def show(summary: dict[str, Any]) -> None:
    """Prints a summary: as a table on a terminal, as plain lines elsewhere."""
    click.echo(
        f"{summary['manifest']}: {sum(summary['num_entries'].values())} entries for {summary['model']}"
    )
    if sys.stdout.isatty():
        _show_table(summary)
    else:
        click.echo("\n".join(_entry_lines(summary)))
    click.echo("\n".join(_facts(summary)))


def server_document(spec: BuildSpec) -> dict[str, Any] | None:
    """Returns what the server's own table covers as a JSON value; None where the server has the manifest's entries."""
    found = coverage_of_server(spec)
    if found is None:
        return None
    smallest = found.coverage.smallest
    return {
        "version": spec.bucketing.version,
        "strategy": spec.bucketing.strategy,
        "closed": found.coverage.is_closed,
        "phases": [dataclasses.asdict(phase) for phase in found.coverage.phases],
        "holes": [str(hole) for hole in found.holes],
        "smallest": dataclasses.asdict(smallest) if smallest else None,
        "fallback": list(found.fallback) if found.fallback else None,
        "cold": [list(bucket) for bucket in found.cold],
    }


def server_lines(document: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields what `server_document` says, in words."""
    if document is None:
        return
    table = f"the server's own table ({document['version']}, {document['strategy']})"
    if document["closed"]:
        yield f"{table} has a bucket for each of these steps"
        yield from _cold_lines(document["cold"])
        return
    lacking = (phase for phase in document["phases"] if phase["num_uncovered"])
    yield f"{table} has no bucket for " + ", ".join(
        f"{phase['num_uncovered']:,} of {phase['num_reachable']:,} {phase['kind']} {phase['unit']}"
        for phase in lacking
    )
    yield f"  the smallest: {document['smallest']['text']}"
    if document["fallback"]:
        fallback = ", ".join(map(str, document["fallback"]))
        yield f"  it then compiles ({fallback}) while the request waits, unless that is warm"
    yield from _cold_lines(document["cold"])


def _cold_lines(cold: list[list[int]]) -> Iterator[str]:
    if cold:
        first = ", ".join(map(str, cold[0]))
        yield f"  {len(cold):,} of its buckets its warm-up does not compile, ({first}) for one: the first step in each does"


def _coverage(manifest: Manifest) -> dict[str, Any]:
    spec, table, steps = (
        manifest.spec,
        BucketTable.from_entries(manifest.entries),
        reachable_of(manifest.spec),
    )
    result = coverage_of(manifest)
    holes = uncovered(steps, table) if any(phase.kind == "prompt" for phase in result.phases) else ()
    return {
        "coverage": {
            "mode": spec.bucketing.coverage,
            "scheduler": described_scheduler(spec),
            "closed": result.is_closed,
            "result": str(result),
            "smallest": str(result.smallest) if result.smallest else None,
            "not_proved": list(result.unproved),
            "left_out": list(left_out(spec)),
            "server_table": server_document(spec),
        },
        "uncovered": [str(hole) for hole in holes],
        "padding": {
            "prompt": _padding(prompt_padding(steps.prompts, table)),
            "decode": _padding(decode_padding(steps.decodes, table)),
        },
    }


def _padding(padding: Padding | None) -> dict[str, Any] | None:
    if padding is None:
        return None
    return {
        "mean": round(padding.mean, 4),
        "error": round(padding.error, 4),
        "worst": round(padding.worst, 4),
        "worst_step": list(padding.worst_step),
        "sampled": padding.is_sampled,
    }


def _memory(manifest: Manifest, budget_bytes: int | None) -> dict[str, Any]:
    try:
        estimate = estimate_memory(manifest.spec, manifest.entries)
    except SpecError as error:
        return {"unknown": str(error), "budget_bytes": budget_bytes}
    steps = {
        entry.kind: {
            "entry": str(entry),
            "activation_bytes": buffers.activation_bytes,
            "kv_bytes": buffers.kv_bytes,
            "mask_bytes": buffers.mask_bytes,
            "logit_bytes": buffers.logit_bytes,
            "total_bytes": buffers.total_bytes,
        }
        for entry, buffers in estimate.steps
    }
    return {
        "num_devices": manifest.spec.parallel.world_size,
        "kv_cache_bytes": estimate.kv_cache_bytes,
        "steps": steps,
        "total_bytes": estimate.total_bytes,
        "budget_bytes": budget_bytes,
    }


def _warnings(manifest: Manifest, memory: dict[str, Any]) -> Iterator[str]:
    explosion = find_explosion(manifest)
    if explosion:
        yield str(explosion)
    for line in skipped_lines(manifest.spec.bucketing):
        yield f"bucketing.file, line {line.number} is left out, as its version of the rules does: {line.problem}"
    budget = memory["budget_bytes"]
    if budget is not None and "unknown" in memory:
        yield f"the memory budget cannot be checked: {memory['unknown']}"
    elif budget is not None and memory["total_bytes"] > budget:
        yield (
            f"KV cache and step buffers need {_sized(memory['total_bytes'])}, the budget is {_sized(budget)}"
            f" ({_sized(memory['kv_cache_bytes'])} of it KV cache: lower limits.num_blocks, or what makes the"
            f" largest step)"
        )


def _size(entry: Entry) -> tuple[Any, ...]:
    """Orders the entries of a kind: steps by what they compute, then by what they read."""
    if isinstance(entry, PromptEntry):
        return entry.batch_size * entry.query_len, entry.batch_size * entry.num_ctx_blocks, *entry.row()
    if isinstance(entry, DecodeEntry):
        return entry.num_blocks, *entry.row()
    return entry.row()


def _entry_lines(summary: dict[str, Any]) -> Iterator[str]:
    for kind, largest in summary["largest"].items():
        padding = summary["padding"].get(kind)
        factors = f"   padding {_factors(padding)}" if padding else ""
        yield f"  {kind:<8}{summary['num_entries'][kind]:>9,}   largest {largest}{factors}"


def _show_table(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("kind")
    table.add_column("entries", justify="right")
    table.add_column("largest")
    table.add_column("padding")
    for kind, largest in summary["largest"].items():
        padding = summary["padding"].get(kind)
        count = f"{summary['num_entries'][kind]:,}"
        table.add_row(kind, count, largest, _factors(padding) if padding else "")
    Console().print(table)


def _factors(padding: dict[str, Any]) -> str:
    sampled = ", of a sample" if padding["sampled"] else ""
    return f"x {padding['mean']:.2f} mean, x {padding['worst']:.2f} worst{sampled}"


def _facts(summary: dict[str, Any]) -> Iterator[str]:
    coverage = summary["coverage"]
    yield f"coverage: {_coverage_line(coverage, len(summary['uncovered']))}"
    yield from server_lines(coverage["server_table"])
    if coverage["left_out"]:
        yield f"left out of the proof: {'; '.join(coverage['left_out'])}"
    yield f"memory: {_memory_line(summary['memory'])}"
    yield f"id: {summary['id']}"


def _coverage_line(coverage: dict[str, Any], num_holes: int) -> str:
    if coverage["smallest"]:
        return f"{num_holes} kinds of steps have no entry, the smallest: {coverage['smallest']}"
    if not coverage["closed"]:
        return str(coverage["result"])
    unproved = ", ".join(coverage["not_proved"])
    but = f" (of {unproved} entries nothing is proved)" if unproved else ""
    scheduler = "the scheduler" if coverage["scheduler"] == "aotgaudi" else coverage["scheduler"]
    return f"every step that {scheduler} can form has an entry{but}"


def _memory_line(memory: dict[str, Any]) -> str:
    if "unknown" in memory:
        return f"not known: {memory['unknown']}"
    steps = "".join(
        f", {_sized(step['total_bytes'])} for {step['entry']}" for step in memory["steps"].values()
    )
    devices = f", on each of {memory['num_devices']} devices" if memory["num_devices"] > 1 else ""
    return f"KV cache {_sized(memory['kv_cache_bytes'])}{steps} (weights not counted{devices})"


def _sized(num_bytes: int) -> str:
    unit, name = next((pair for pair in _UNITS if num_bytes >= pair[0]), _UNITS[-1])
    return f"{num_bytes / unit:,.2f} {name}"
