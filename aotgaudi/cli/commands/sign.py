"""``aotgaudi sign``: adds signatures to a sealed bundle."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from aotgaudi.atomicfile import write_atomic
from aotgaudi.bundle.bundle import Bundle, open_bundle, read_signature
from aotgaudi.bundle.format import SIGNATURE_NAME
from aotgaudi.bundle.signature import Statement, load_envelope
from aotgaudi.bundle.signing import Signing, add_signatures
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.cli.options.signing import epoch_option, load_keys, sign_key_option
from aotgaudi.manifest.codec import loads

_MODE = 0o644


@click.command()
@click.argument("bundle_path", metavar="BUNDLE", type=click.Path(path_type=Path))
@functools.partial(sign_key_option, required=True)
@epoch_option
def sign(bundle_path: Path, sign_keys: tuple[Path, ...], epoch: int | None) -> None:
    """Verify BUNDLE and add a signature by each key to those that it has.

    The epoch is that of the signatures that are there; of the first one it is N, or 0.
    """
    keys = load_keys(sign_keys)
    bundle = open_bundle(bundle_path)
    _refuse_damaged(bundle)
    existing = read_signature(bundle_path)
    documents = (bundle.index_bytes, bundle.index, bundle.receipt)
    if existing is None:
        signed = Signing(keys, epoch or 0).sign(*documents)
    else:
        signed = add_signatures(existing, keys, Statement.of(*documents, epoch=0), epoch)
    if signed != existing:
        write_atomic(bundle_path / SIGNATURE_NAME, signed, _MODE)
    num_signatures = len(load_envelope(signed).signatures)
    click.echo(f"signature: {bundle_path / SIGNATURE_NAME} ({num_signatures} in all)")


def _refuse_damaged(bundle: Bundle) -> None:
    """Raises CorruptError: nobody should vouch for what is not what was sealed. Cold entries are no damage."""
    report = verify_bundle(bundle, {entry.id: str(entry) for entry in loads(bundle.manifest_bytes).entries})
    if report.corrupt or report.extra:
        report.raise_if_bad(bundle.path)
