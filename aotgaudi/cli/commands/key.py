"""``aotgaudi key``: keys that sign bundles."""

from __future__ import annotations

import json
from pathlib import Path

import click

from aotgaudi.bundle.signing import generate_key


@click.group()
def key() -> None:
    """Make keys that sign bundles."""


@key.command("generate")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the files and the key's id as JSON.")
def generate(path: Path, as_json: bool) -> None:
    """Write a new ed25519 private key to FILE (only you may read it) and its public key to FILE.pub.

    Existing files are never overwritten.
    """
    made = generate_key(path)
    if as_json:
        document = {"private_key": str(path), "public_key": f"{path}.pub", "key_id": made.key_id}
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(f"private key: {path}: keep it secret; it signs (--sign-key)")
    click.echo(f"public key: {path}.pub: for those who verify (--trusted-key), id {made.key_id[:12]}...")
