"""Signs bundles: handles private keys, and writes ``aotgaudi.signature.json`` (format in signature.py). Offline.

A private key is an ed25519 key in a PEM file (PKCS 8) that only its owner may read. ed25519 is deterministic and the
statement holds no time, so signing twice gives the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from aotgaudi.bundle.format import BundleIndex
from aotgaudi.bundle.receipt import SealedReceipt
from aotgaudi.bundle.signature import (
    PAYLOAD_TYPE,
    Envelope,
    Signature,
    Statement,
    dump_envelope,
    load_envelope,
    load_statement,
)
from aotgaudi.bundle.trust import KEY_REMEDY, TrustedKey, read_key_file
from aotgaudi.errors import ManifestError, SpecError, UntrustedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True)
class SigningKey:
    """An ed25519 private key. Signatures are deterministic: the same data gives the same 64 bytes."""

    public: TrustedKey
    _private: Ed25519PrivateKey = field(repr=False, compare=False)

    def sign(self, data: bytes) -> bytes:
        """Returns the signature over `data`."""
        from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined] # documented, not re-exported

        return bytes.fromhex(CryptoSigner(self._private).sign(data).signature)


def generate_key(path: Path) -> TrustedKey:
    """Writes a new private key to `path` (mode 0600) and its public key to ``<path>.pub`` (mode 0644).

    Raises SpecError, and writes neither, if either file exists or cannot be written.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    public_path = path.with_name(f"{path.name}.pub")
    _write_new(public_path, public, 0o644)
    try:
        _write_new(path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    except BaseException:
        public_path.unlink()
        raise
    return TrustedKey(private.public_key().public_bytes_raw())


def load_signing_key(path: Path) -> SigningKey:
    """Reads a private key. Raises SpecError if the file holds no key, UntrustedError if others may read it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data, mode = read_key_file(path)
    if mode & 0o077:
        raise UntrustedError(f"{path}: others may read this key (mode {mode:04o}) (chmod 600 {path})")
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError as error:
        raise SpecError(str(path), "is encrypted", "decrypt it first: openssl pkey -in FILE") from error
    except Exception as error:
        raise SpecError(str(path), "is not a private key in PEM", KEY_REMEDY) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SpecError(str(path), "is not an ed25519 key", KEY_REMEDY)
    return SigningKey(TrustedKey(key.public_key().public_bytes_raw()), key)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise SpecError(
            str(path), "is there already, and a key is never overwritten", "choose another name"
        ) from error
    except OSError as error:
        raise SpecError(str(path), f"cannot be written: {error.strerror}", "choose another place") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise SpecError(str(path), f"cannot be written: {error.strerror}", "choose another place") from error


@dataclass(frozen=True)
class Signing:
    """The keys that sign (at least one). A repeated key signs once."""

    keys: tuple[SigningKey, ...]

    def sign(self, index_bytes: bytes, index: BundleIndex, receipt: SealedReceipt) -> bytes:
        """Returns the signature file of the bundle with these documents."""
        return add_signatures(None, self.keys, Statement.of(index_bytes, index, receipt))


def add_signatures(existing: bytes | None, keys: tuple[SigningKey, ...], statement: Statement) -> bytes:
    """Returns the signature file `existing` with signatures by `keys` added. A key that has signed does not sign again.

    `statement` describes the bundle. Existing signatures are kept without verification, because the verifier decides which
    keys to trust. Raises ManifestError if `existing` is malformed or about another bundle.
    """
    envelope = Envelope(statement.dumps(), PAYLOAD_TYPE, ()) if existing is None else load_envelope(existing)
    if envelope.payload_type != PAYLOAD_TYPE:
        raise ManifestError(f"signature: is over {envelope.payload_type!r:.100}, should be {PAYLOAD_TYPE!r}")
    if load_statement(envelope.payload) != statement:
        raise ManifestError("signature: is of another bundle (remove it, and sign again)")
    made = [Signature(key.public.key_id, key.sign(envelope.signed_bytes())) for key in dict.fromkeys(keys)]
    known = {row.value for row in made} | {row.key_id for row in made}
    kept = [row for row in envelope.signatures if row.value not in known and row.key_id not in known]
    return dump_envelope(replace(envelope, signatures=(*kept, *made)))
