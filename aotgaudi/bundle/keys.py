"""Keys that are trusted: ed25519 public keys, in PEM files (SubjectPublicKeyInfo)."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import SpecError

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
    """Reads a public key. Raises SpecError where there is none."""
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
