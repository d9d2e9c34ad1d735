"""Signing a bundle: ``aotgaudi.signature.json`` beside the index (formats in envelope.py and statement.py).

Offline. ed25519 is deterministic and the statement holds no time, so that signing twice gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotgaudi.bundle.envelope import Envelope, Signature, dump_envelope, load_envelope
from aotgaudi.bundle.format import BundleIndex
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.bundle.signing_keys import SigningKey
from aotgaudi.bundle.statement import PAYLOAD_TYPE, Statement, dump_statement, load_statement
from aotgaudi.errors import ManifestError, SpecError


@dataclass(frozen=True)
class Signing:
    """The keys that sign (at least one; the same key twice signs once), and the epoch that they sign for."""

    keys: tuple[SigningKey, ...]
    epoch: int = 0

    def sign(self, index_bytes: bytes, index: BundleIndex, receipt: Receipt) -> bytes:
        """Returns the signature file of the bundle with these documents."""
        statement = Statement.of(index_bytes, index, receipt, self.epoch)
        return dump_envelope(_signed(dump_statement(statement), (), self.keys))


def add_signatures(
    existing: bytes, keys: tuple[SigningKey, ...], statement: Statement, epoch: int | None
) -> bytes:
    """Returns the signature file `existing` with those of `keys` besides. A key that has signed signs no second time.

    `statement` is what the bundle is, of any epoch; `epoch` None means that of `existing`. What is there is kept
    unverified: who trusts whom is decided by who verifies. Raises ManifestError when `existing` is malformed or of
    another bundle, and SpecError when it is for another epoch.
    """
    envelope = load_envelope(existing)
    if envelope.payload_type != PAYLOAD_TYPE:
        raise ManifestError(f"signature: is over {envelope.payload_type!r:.100}, should be {PAYLOAD_TYPE!r}")
    signed = load_statement(envelope.payload)
    if epoch is not None and epoch != signed.epoch:
        raise SpecError(
            "--epoch",
            f"is {epoch}, the bundle is signed for epoch {signed.epoch}",
            "remove that signature first",
        )
    wanted = statement.predicate.model_copy(update={"epoch": signed.epoch})
    if signed != statement.model_copy(update={"predicate": wanted}):
        raise ManifestError("signature: is of another bundle (remove it, and sign again)")
    return dump_envelope(_signed(envelope.payload, envelope.signatures, keys))


def _signed(payload: bytes, before: tuple[Signature, ...], keys: tuple[SigningKey, ...]) -> Envelope:
    bare = Envelope(payload, PAYLOAD_TYPE, ()).signed_bytes()
    made = [Signature(key.public.key_id, key.sign(bare)) for key in dict.fromkeys(keys)]
    known = {row.value for row in made} | {row.key_id for row in made}
    kept = [row for row in before if row.value not in known and row.key_id not in known]
    return Envelope(payload, PAYLOAD_TYPE, tuple(sorted({*kept, *made})))
