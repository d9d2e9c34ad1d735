"""``aotgaudi cache root``: what the store keeps, however large it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pydantic

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.format import load_program, program_objects
from aotgaudi.bundle.receipt import RECEIPT_SCHEMA, Receipt
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.bundle.sealed import programs_of
from aotgaudi.cli.commands.cache import size_text
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.document import first_problem
from aotgaudi.errors import StoreError
from aotgaudi.manifest.codec import load_manifest_or_spec
from aotgaudi.store.roots import Root
from aotgaudi.store.store import Store
from aotgaudi.wrap.capture_records import capture_key


@click.group("root")
def root() -> None:
    """Choose what `cache gc` must never remove."""


@root.command("add")
@click.argument("name")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print what is kept as JSON.")
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
    row = _document(kept)
    size = size_text(row["object_bytes"])
    line = f"root: {name} keeps {row['num_records']} records and {row['num_objects']} objects ({size})"
    click.echo(json.dumps(row, indent=2) if as_json else line)


@root.command("remove")
@click.argument("name")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print the name as JSON.")
def remove(name: str, place: StorePlace, as_json: bool) -> None:
    """Stop keeping NAME; `cache gc` may then remove what only NAME kept."""
    store = place.open(create=False)
    store.require_writable()
    store.roots.remove(name)
    click.echo(json.dumps({"name": name}, indent=2) if as_json else f"root: {name} is kept no longer")


@root.command("list")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print the roots as JSON.")
def list_(place: StorePlace, as_json: bool) -> None:
    """List what is kept."""
    rows = [_document(item) for item in place.open(create=False).roots]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']}: {row['num_records']} records, {row['num_objects']} objects")


def _document(item: Root) -> dict[str, Any]:
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
        keys = {capture_key(bundle.launch).hex} if is_capture else programs_of(bundle).units
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
    """The artifacts and programs that sealing the receipt needs. Raises StoreError when one is not there."""
    objects = {digest for unit in receipt.units.values() for digest in unit.artifact.values()}
    for digest in receipt.programs.values():
        program = load_program(store.objects.read(digest), digest)
        objects |= {digest, *program_objects(program, receipt)}
    return Root(name=name, keys=frozenset(receipt.units), objects=frozenset(objects))
