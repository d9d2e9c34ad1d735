"""Whom we trust: public keys, how many of them must have signed a bundle, and whether they have.

A trusted key is an ed25519 public key in a PEM file (SubjectPublicKeyInfo). Signatures are verified before anything
else of a bundle is parsed: the envelope is read once, the statement that is parsed is the payload that was
verified, and it must name the very bytes of the index that were read. A key id is shown to people and decides nothing:
every signature is tried with every trusted key, and each key counts once.

The mathematics is `cryptography`'s. securesystemslib, which signs, goes by key ids when it verifies, and on import loads
what else is installed (boto3, say): it stays offline.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aotgaudi.bundle.signature import PAYLOAD_TYPE, Envelope, Statement, load_envelope, load_statement
from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import ManifestError, SpecError, UntrustedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

KEY_REMEDY = "make a pair with: aotgaudi key generate FILE"
_MAX_KEY_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """An ed25519 public key (32 bytes)."""

    raw: bytes

    @property
    def key_id(self) -> str:
        """Securesystemslib's default key id: the sha256 of the key's canonical JSON, 64 hex digits."""
        keyval = {"public": self.raw.hex()}
        return sha256_bytes(canonical_json({"keytype": "ed25519", "scheme": "ed25519", "keyval": keyval}))

    def has_signed(self, signature: bytes, data: bytes) -> bool:
        """Whether `signature` is this key's over `data`."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, data)
        except InvalidSignature:
            return False
        return True


def load_trusted_key(path: Path) -> TrustedKey:
    """Reads a public key. Raises SpecError if the file holds none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data, _ = read_key_file(path)
    if b"PRIVATE KEY" in data:
        raise SpecError(str(path), "is a private key", "give the public one, and keep this one secret")
    try:
        key = load_pem_public_key(data)
    except Exception as error:
        raise SpecError(str(path), "is not a public key in PEM", KEY_REMEDY) from error
    if not isinstance(key, Ed25519PublicKey):
        raise SpecError(str(path), "is not an ed25519 key", KEY_REMEDY)
    return trusted(key)


def trusted(key: Ed25519PublicKey) -> TrustedKey:
    """Returns our value of a public key."""
    return TrustedKey(key.public_bytes_raw())


def read_key_file(path: Path) -> tuple[bytes, int]:
    """Returns a key file's bytes and permissions, of one opening. Raises SpecError."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", KEY_REMEDY) from error
    if len(data) > _MAX_KEY_BYTES:
        raise SpecError(str(path), "is too large for a key", KEY_REMEDY)
    return data, mode


@dataclass(frozen=True)
class SignaturePolicy:
    """Demands signatures by `threshold` distinct ones of `keys`, over an epoch of at least `minimum_epoch`.

    Raises SpecError when there are fewer distinct keys than `threshold`.
    """

    keys: frozenset[TrustedKey]
    threshold: int = 1
    minimum_epoch: int = 0

    def __post_init__(self) -> None:
        """Checks that the demand can be met."""
        if not 1 <= self.threshold <= len(self.keys):
            raise SpecError(
                "--threshold",
                f"is {self.threshold}, with {len(self.keys)} distinct trusted keys",
                "at least 1, at most the number of different --trusted-key",
            )

    def verify(self, envelope_bytes: bytes, index_bytes: bytes, bundle: Path) -> Statement:
        """Returns the statement that trusted keys have signed of the index. Raises UntrustedError in one line."""
        try:
            envelope = load_envelope(envelope_bytes)
            self._require_signers(envelope)
            statement = load_statement(envelope.payload)
        except (ManifestError, UntrustedError) as error:
            raise UntrustedError(f"bundle {bundle} is not to be trusted: {error}") from error
        found = sha256_bytes(index_bytes)
        if statement.index_sha256 != found:
            raise UntrustedError(
                f"bundle {bundle} is not what was signed: its index has sha256 {found[:12]}...,"
                f" the signature is of {statement.index_sha256[:12]}... (it was edited, or is another bundle's)"
            )
        if statement.epoch < self.minimum_epoch:
            raise UntrustedError(
                f"bundle {bundle} was signed for epoch {statement.epoch}, --minimum-epoch is {self.minimum_epoch}"
                " (it is an older one: use the newer bundle)"
            )
        return statement

    def _require_signers(self, envelope: Envelope) -> None:
        if envelope.payload_type != PAYLOAD_TYPE:
            raise UntrustedError(
                f"the signature is over {envelope.payload_type!r:.100}, should be {PAYLOAD_TYPE!r}"
            )
        signed = envelope.signed_bytes()
        signers = {
            key for key in self.keys if any(key.has_signed(row.value, signed) for row in envelope.signatures)
        }
        if len(signers) < self.threshold:
            raise UntrustedError(self._lacking(envelope, len(signers)))

    def _lacking(self, envelope: Envelope, num_signers: int) -> str:
        trusted = {key.key_id for key in self.keys}
        named = sorted({row.key_id for row in envelope.signatures})
        if trusted.intersection(named) and not num_signers:
            hint = "a signature names a trusted key and was not made by it: forged, or what was signed was changed"
        else:
            hint = f"signed by {_short(named)}; trusted: {_short(sorted(trusted))}"
        return f"trusted keys that have signed it: {num_signers}, should be {self.threshold} ({hint})"


def require_match(statement: Statement, expected: Statement, bundle: Path) -> None:
    """Raises UntrustedError, which names the field, unless what was signed is exactly what the bundle is."""
    signed, found = statement.predicate.model_dump(), expected.predicate.model_dump()
    differing = [name for name in found if signed[name] != found[name]]
    if differing or statement != expected:
        names = ", ".join(differing) or "subject"
        raise UntrustedError(f"bundle {bundle} is not what was signed: the statement has another {names}")


def _short(key_ids: list[str]) -> str:
    return ", ".join(f"{key_id:.12}..." if key_id else "an unnamed key" for key_id in key_ids[:4])
