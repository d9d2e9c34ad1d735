"""``aotgaudi cache stats``, ``gc``, ``fsck`` and ``root``: show what the store holds, and keep it small and sound."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import pydantic

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.programs import load_program, program_objects
from aotgaudi.bundle.receipt import RECEIPT_SCHEMA, Receipt
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.cli.options import (
    StorePlace,
    jobs_option,
    json_option,
    parse_store_size,
    parsed_by,
    store_options,
)
from aotgaudi.cli.show import emit, first_lines, size_text
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.compile.plan import Plan
from aotgaudi.document import first_problem
from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.manifest.manifest import load_manifest_or_spec
from aotgaudi.store.collect import CollectionPlan, StoreUsage, collect, collect_unless_used, measure_store
from aotgaudi.store.fsck import FsckReport, Loss, check_store
from aotgaudi.store.store import Root, Store
from aotgaudi.wrap.capture_records import capture_key


@click.command("stats")
@store_options
@json_option("Print the figures as JSON.")
def stats(place: StorePlace, as_json: bool) -> None:
    """Count what the store holds."""
    store = place.read()
    usage = measure_store(store)
    document = {"store": str(store.root), **_usage_document(usage)}
    emit(document, as_json, [f"store      {store.root}", *_usage_lines(usage)])


@click.command("gc")
@store_options
@click.option(
    "--max-size",
    required=True,
    metavar="SIZE",
    callback=parsed_by(parse_store_size),
    help="Most that results, logs and tool caches may take, e.g. 20GiB.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option("Print the outcome as JSON.")
def gc(place: StorePlace, max_size: int, dry_run: bool, as_json: bool) -> None:
    """Shrink the store to SIZE: least recently used first; what a root keeps is never removed.

    Refuses to run while a build or a seal uses the store.
    """
    store = place.open(create=False)
    if not dry_run:
        store.require_writable()
    plan = collect(store, max_size, dry_run=dry_run)
    document = _collection_document(plan, max_size, dry_run=dry_run)
    emit(document, as_json, collection_line(document))


def collect_after_build(store: Store, max_bytes: int, plan: Plan) -> dict[str, Any] | None:
    """Shrinks the store after a build, but keeps what `plan` found. Returns what was removed, as a JSON value.

    Returns None if the store is read-only, or if others still use it: the last of them collects.
    """
    if store.read_only:
        return None
    done = collect_unless_used(store, max_bytes, [plan.as_root("build")])
    return None if done is None else _collection_document(done, max_bytes, dry_run=False)


def collection_line(document: dict[str, Any] | None) -> str:
    """Returns what a collection did, for people."""
    if document is None:
        return "gc: left to the others that use the store"
    verb = "would remove" if document["dry_run"] else "removed"
    after = document["bytes_after"]
    line = (
        f"gc: {verb} {document['num_records']} records, {document['num_objects']} objects"
        f" ({document['num_orphans']} that nothing names) and {document['num_scratch']} logs and tool caches;"
        f" {size_text(document['bytes_before'])} -> {size_text(after)}"
    )
    if after > document["max_bytes"]:
        line += (
            f", more than {size_text(document['max_bytes'])}: {size_text(document['kept_bytes'])} are kept"
        )
    if document["num_bad_records"]:
        line += f"; {document['num_bad_records']} records are damaged (aotgaudi cache fsck)"
    return line


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


def _collection_document(plan: CollectionPlan, max_bytes: int, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "max_bytes": max_bytes,
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "kept_bytes": plan.kept_bytes,
        "num_orphans": len(plan.orphans),
        "num_records": len(plan.evicted),
        "num_objects": len(plan.objects),
        "num_scratch": len(plan.scratch),
        "num_bad_records": len(plan.bad_records),
        "num_swept": plan.swept,
    }


_MOST_LINES = 20
_MORE = "  and {} more (--json)"


@click.command("fsck")
@store_options
@jobs_option
@click.option("--dry-run", is_flag=True, help="Leave what is bad where it is.")
@json_option("Print the report as JSON.")
@click.pass_context
def fsck(context: click.Context, place: StorePlace, jobs: int, dry_run: bool, as_json: bool) -> None:
    """Verify every object and record. Builders may go on working meanwhile.

    Exits with 0 if all is sound, and with 4 if something was bad. Bad files are removed, and building makes them again; a
    directory that is none of the store's is only named.
    """
    store = place.open(create=False)
    report = check_store(store, jobs, remove=not dry_run)
    if as_json:
        click.echo(json.dumps(_document(report), indent=2))
    else:
        click.echo("\n".join(_lines(report)), err=not report.is_clean)
    context.exit(0 if report.is_clean else CorruptError.exit_code)


def describe_loss(loss: Loss) -> str:
    """Returns what a rebuild would restore, for people: a unit by its label, a program by its entry."""
    label = loss.value.get("label")
    if isinstance(label, str):
        return label
    components = loss.value.get("components")
    if isinstance(components, dict):
        entry = [str(value) for name, value in components.items() if str(name).startswith("entry.")]
        return f"trace of {' '.join(entry)}"
    return f"record {loss.key:.12}"


def _document(report: FsckReport) -> dict[str, Any]:
    return {
        "clean": report.is_clean,
        "num_objects": report.num_objects,
        "num_records": report.num_records,
        "object_bytes": report.object_bytes,
        "damage": [
            {"path": item.path, "reason": item.reason, "removed": item.is_removed} for item in report.damage
        ],
        "rebuild": [
            {
                "key": loss.key,
                "what": describe_loss(loss),
                "missing": [str(digest) for digest in loss.missing],
            }
            for loss in report.losses
        ],
    }


def _lines(report: FsckReport) -> list[str]:
    head = f"fsck: {report.num_objects} objects ({report.object_bytes} bytes) and {report.num_records} records read"
    if report.is_clean and not report.losses:
        return [f"{head}: all sound"]
    lines = [f"{head}: {len(report.damage)} bad"]
    damage = [
        f"  {item.path}: {item.reason}{' (removed)' if item.is_removed else ''}" for item in report.damage
    ]
    lines += first_lines(damage, _MOST_LINES, _MORE)
    if report.losses:
        lines.append(f"{len(report.losses)} results lack an object; building them again mends:")
        lines += first_lines([f"  {describe_loss(loss)}" for loss in report.losses], _MOST_LINES, _MORE)
    return lines


@click.group("root")
def root() -> None:
    """Choose what `cache gc` must never remove."""


@root.command("add")
@click.argument("name")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@store_options
@json_option("Print what is kept as JSON.")
def add(name: str, path: Path, place: StorePlace, as_json: bool) -> None:
    """Keep, as NAME, what PATH needs: a bundle, a receipt, or a manifest or spec (what of it is built by now)."""
    store = place.open(create=False)
    store.require_writable()
    try:
        with store.in_use():
            kept = _kept_by(name, path, store)
            store.roots.put(kept)
    except pydantic.ValidationError as error:
        raise StoreError(f"cannot keep {path}: {first_problem(error)}") from error
    row = _root_document(kept)
    size = size_text(row["object_bytes"])
    line = f"root: {name} keeps {row['num_records']} records and {row['num_objects']} objects ({size})"
    emit(row, as_json, line)


@root.command("remove")
@click.argument("name")
@store_options
@json_option("Print the name as JSON.")
def remove(name: str, place: StorePlace, as_json: bool) -> None:
    """Stop keeping NAME; `cache gc` may then remove what only NAME kept."""
    store = place.open(create=False)
    store.require_writable()
    store.roots.remove(name)
    emit({"name": name}, as_json, f"root: {name} is kept no longer")


@root.command("list")
@store_options
@json_option("Print the roots as JSON.")
def list_(place: StorePlace, as_json: bool) -> None:
    """List what is kept."""
    rows = [_root_document(item) for item in place.open(create=False).roots]
    if as_json or rows:
        emit(
            rows,
            as_json,
            (f"{row['name']}: {row['num_records']} records, {row['num_objects']} objects" for row in rows),
        )


def _root_document(item: Root) -> dict[str, Any]:
    return {
        "name": item.name,
        "num_records": len(item.keys),
        "num_objects": len(item.objects),
        "object_bytes": sum(digest.size_bytes for digest in item.objects),
    }


def _kept_by(name: str, path: Path, store: Store) -> Root:
    if path.is_dir():
        bundle = open_bundle(path)
        is_capture = isinstance(bundle.receipt, CaptureReceipt)
        keys = {capture_key(bundle.launch).hex} if is_capture else bundle.require_programs().units
        return Root(name=name, keys=frozenset(keys), objects=frozenset(bundle.index.objects))
    if path.suffix != ".toml" and _is_receipt(path):
        return _kept_by_receipt(name, load_receipt(path.read_bytes()), store)
    return plan_manifest(load_manifest_or_spec(path), store).as_root(name)


def _is_receipt(path: Path) -> bool:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("schema") == RECEIPT_SCHEMA


def _kept_by_receipt(name: str, receipt: Receipt, store: Store) -> Root:
    """Returns the root of artifacts and programs that sealing the receipt needs. Raises StoreError if one is missing."""
    objects = {digest for unit in receipt.units.values() for digest in unit.artifact.values()}
    for digest in receipt.programs.values():
        program = load_program(store.objects.read(digest), digest)
        objects |= {digest, *program_objects(program, receipt)}
    return Root(name=name, keys=frozenset(receipt.units), objects=frozenset(objects))
