"""``aotgaudi key``: keys that sign bundles."""

from __future__ import annotations

from pathlib import Path

import click

from aotgaudi.bundle.signing import generate_key


@click.group()
def key() -> None:
    """Make keys that sign bundles."""


@key.command("generate")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
def generate(path: Path) -> None:
    """Write a new ed25519 private key to FILE (only you may read it) and its public key to FILE.pub.

    Nothing that is there is overwritten.
    """
    made = generate_key(path)
    click.echo(f"private key: {path}: keep it secret; it signs (--sign-key)")
    click.echo(f"public key: {path}.pub: for those who verify (--trusted-key), id {made.key_id[:12]}...")
