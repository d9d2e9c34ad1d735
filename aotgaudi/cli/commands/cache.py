"""``aotgaudi cache``: what the store holds, and keeping it small and sound."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import click

from aotgaudi.cli.options.store import StorePlace, store_options, to_store_size
from aotgaudi.cli.verbs import CACHE_COMMANDS, LazyGroup
from aotgaudi.compile.plan import Plan
from aotgaudi.store.collect import Collection, StoreUsage, collect, collect_unless_used, measure_store
from aotgaudi.store.store import Store


@click.group(cls=LazyGroup, lazy=CACHE_COMMANDS)
def cache() -> None:
    """Inspect, shrink, check and share the store, and choose what it keeps."""


@click.command("stats")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def stats(place: StorePlace, as_json: bool) -> None:
    """Count what the store holds."""
    store = place.open(create=False)
    usage = measure_store(store)
    if as_json:
        click.echo(json.dumps({"store": str(store.root), **_usage_document(usage)}, indent=2))
        return
    click.echo(f"store      {store.root}")
    for line in _usage_lines(usage):
        click.echo(line)


@click.command("gc")
@store_options
@click.option(
    "--max-size",
    required=True,
    metavar="SIZE",
    callback=to_store_size,
    help="Most that results, logs and tool caches may take, e.g. 20GiB.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def gc(place: StorePlace, max_size: int, dry_run: bool, as_json: bool) -> None:
    """Shrink the store to SIZE: least recently used first; what a root keeps is never removed. Unfinished pulls always go.

    Refuses to run while a build or a seal uses the store.
    """
    store = place.open(create=False)
    if not dry_run:
        store.require_writable()
    outcome = collect(store, max_size, dry_run=dry_run)
    document = _collection_document(outcome, max_size, dry_run=dry_run)
    click.echo(json.dumps(document, indent=2) if as_json else collection_line(document))


def collect_after_build(store: Store, max_bytes: int, plan: Plan) -> dict[str, Any] | None:
    """Shrinks the store after a build, but keeps what `plan` found; returns what was removed, as a JSON value.

    Returns None if the store is read-only, or others still use it: the last of them collects.
    """
    if store.read_only:
        return None
    outcome = collect_unless_used(store, max_bytes, [plan.as_root("build")])
    return None if outcome is None else _collection_document(outcome, max_bytes, dry_run=False)


def collection_line(document: dict[str, Any] | None) -> str:
    """Says what a collection did, for people."""
    if document is None:
        return "gc: left to the others that use the store"
    verb = "would remove" if document["dry_run"] else "removed"
    after = document["bytes_after"]
    line = (
        f"gc: {verb} {document['num_records']} records, {document['num_objects']} objects"
        f" ({document['num_orphans']} that nothing names) and {document['num_scratch']} logs, tool caches and"
        f" unfinished pulls; {size_text(document['bytes_before'])} -> {size_text(after)}"
    )
    if after > document["max_bytes"]:
        line += (
            f", more than {size_text(document['max_bytes'])}: {size_text(document['kept_bytes'])} are kept"
        )
    if document["num_bad_records"]:
        line += f"; {document['num_bad_records']} records are damaged (aotgaudi cache fsck)"
    return line


def size_text(size_bytes: int) -> str:
    """A size for people: ``1.2 GB`` (powers of 1000, as disks are sold)."""
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _usage_document(usage: StoreUsage) -> dict[str, Any]:
    return {
        "kinds": {kind: asdict(amount) for kind, amount in usage.kinds.items()},
        "total": asdict(usage.total),
        "roots": list(usage.root_names),
        "index": usage.index,
        "oldest_use": _time_text(usage.oldest_use),
        "newest_use": _time_text(usage.newest_use),
    }


def _usage_lines(usage: StoreUsage) -> list[str]:
    rows = [*usage.kinds.items(), ("total", usage.total)]
    lines = [
        f"{kind:10} {amount.num_files:>8} files {size_text(amount.size_bytes):>12}" for kind, amount in rows
    ]
    uses = f"{_time_text(usage.oldest_use)} to {_time_text(usage.newest_use)}"
    return [
        *lines,
        f"{'kept':10} {', '.join(usage.root_names) or 'nothing (aotgaudi cache root add)'}",
        f"{'used':10} {uses if usage.oldest_use is not None else 'never'}",
        f"{'index':10} {usage.index}",
    ]


def _time_text(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="seconds")


def _collection_document(outcome: Collection, max_bytes: int, *, dry_run: bool) -> dict[str, Any]:
    plan = outcome.plan
    return {
        "dry_run": dry_run,
        "max_bytes": max_bytes,
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "kept_bytes": outcome.kept_bytes,
        "num_orphans": len(plan.orphans),
        "num_records": len(plan.evicted),
        "num_objects": len(plan.objects),
        "num_scratch": len(plan.scratch),
        "num_bad_records": len(outcome.bad_records),
        "num_swept": outcome.swept.num_removed,
    }
