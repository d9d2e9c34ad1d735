"""``aotgaudi sign`` adds signatures to a sealed bundle; ``aotgaudi key`` makes the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.bundle import Bundle, open_bundle, read_signature
from aotgaudi.bundle.format import SIGNATURE_NAME
from aotgaudi.bundle.signature import Statement, load_envelope
from aotgaudi.bundle.signing import add_signatures, generate_key
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.cli.build_options import SigningOptions
from aotgaudi.cli.options import json_option, options_of, path_argument
from aotgaudi.cli.show import emit
from aotgaudi.errors import StoreError
from aotgaudi.files import lock_directory, write_atomic

_MODE = 0o644


@click.command()
@path_argument("bundle_path", metavar="BUNDLE")
@options_of(SigningOptions, "signing", sign_keys={"required": True})
@json_option("Print what was signed, and by whom, as JSON.")
def sign(bundle_path: Path, signing: SigningOptions, as_json: bool) -> None:
    """Verify BUNDLE and add a signature by each key to those that it has."""
    keys = signing.keys()
    bundle = open_bundle(bundle_path)
    _refuse_damaged(bundle)
    statement = Statement.of(bundle.index_bytes, bundle.index, bundle.receipt)
    with lock_directory(bundle_path.resolve()) as is_ours:  # Another signer may be adding to the same file.
        if is_ours is False:
            raise StoreError(
                f"cannot sign {bundle_path}: another process holds its lock (sign again when it has ended)"
            )
        existing = read_signature(bundle_path)
        signed = add_signatures(existing, keys, statement)
        if signed != existing:
            write_atomic(bundle_path / SIGNATURE_NAME, signed, _MODE)
    document = _document(bundle, signed, is_new=signed != existing)
    emit(document, as_json, f"signature: {document['signature']} ({len(document['key_ids'])} in all)")


def _document(bundle: Bundle, signed: bytes, *, is_new: bool) -> dict[str, Any]:
    """Returns a JSON value. Its `key_ids` are the signatures' own claims: a hint, not a proof."""
    envelope = load_envelope(signed)
    return {
        "bundle": str(bundle.path),
        "signature": str(bundle.path / SIGNATURE_NAME),
        "is_new": is_new,
        "key_ids": [row.key_id for row in envelope.signatures],
    }


def _refuse_damaged(bundle: Bundle) -> None:
    """Raises CorruptError if the bundle is not what was sealed, because nobody should sign that. Cold entries are fine."""
    report = verify_bundle(bundle)
    if report.corrupt or report.extra:
        report.raise_if_bad(bundle.path)


@click.group()
def key() -> None:
    """Make keys that sign bundles."""


@key.command("generate")
@path_argument("path", metavar="FILE")
@json_option("Print the files and the key's id as JSON.")
def generate(path: Path, as_json: bool) -> None:
    """Write a new ed25519 private key to FILE (only you may read it) and its public key to FILE.pub.

    Existing files are never overwritten.
    """
    made = generate_key(path)
    document = {"private_key": str(path), "public_key": f"{path}.pub", "key_id": made.key_id}
    lines = (
        f"private key: {path}: keep it secret; it signs (--sign-key)",
        f"public key: {path}.pub: for those who verify (--trusted-key), id {made.key_id[:12]}...",
    )
    emit(document, as_json, lines)
