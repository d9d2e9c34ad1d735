"""Self-signed certificates and their keys, as files."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """A PEM file with a certificate, and one with its key."""

    certfile: Path
    keyfile: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--ssl-certfile", str(self.certfile), "--ssl-keyfile", str(self.keyfile))


def make_certificate(folder: Path, name: str = "server") -> Certificate:
    """Returns a new certificate, long expired and for another host: those are no matter of ours."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name}.example")])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    found = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    found.certfile.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    found.keyfile.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
    return found
