"""What a manifest holds, for people and as JSON: entries, coverage, memory, warnings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from aotgaudi.bucketing.coverage import uncovered
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import Padding, decode_padding, prompt_padding
from aotgaudi.bucketing.versions import skipped_lines
from aotgaudi.entries import ENTRY_KINDS, DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.explosion import find_explosion
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import estimate_memory

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


def _coverage(manifest: Manifest) -> dict[str, Any]:
    spec, table = manifest.spec, BucketTable.from_entries(manifest.entries)
    contiguous_pa = spec.bucketing.contiguous_pa
    result = coverage_of(manifest)
    holes = uncovered(spec.limits, table, contiguous_pa=contiguous_pa) if result.phases else ()
    return {
        "coverage": {
            "mode": spec.bucketing.coverage,
            "closed": result.is_closed,
            "smallest": str(result.smallest) if result.smallest else None,
            "not_proved": list(result.unproved),
        },
        "uncovered": [str(hole) for hole in holes],
        "padding": {
            "prompt": _padding(prompt_padding(spec.limits, table)),
            "decode": _padding(decode_padding(spec.limits, table, contiguous_pa=contiguous_pa)),
        },
    }


def _padding(padding: Padding | None) -> dict[str, Any] | None:
    if padding is None:
        return None
    return {
        "mean": round(padding.mean, 4),
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
    yield f"coverage: {_coverage_line(summary['coverage'], len(summary['uncovered']))}"
    yield f"memory: {_memory_line(summary['memory'])}"
    yield f"id: {summary['id']}"


def _coverage_line(coverage: dict[str, Any], num_holes: int) -> str:
    if not coverage["closed"]:
        return f"{num_holes} kinds of steps have no entry, the smallest: {coverage['smallest']}"
    unproved = ", ".join(coverage["not_proved"])
    but = f" (of {unproved} entries nothing is proved)" if unproved else ""
    return f"every step that the scheduler can form has an entry{but}"


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
