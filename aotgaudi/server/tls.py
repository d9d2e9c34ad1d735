"""Reads the files that TLS needs, and reports what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aotgaudi.errors import SpecError

if TYPE_CHECKING:
    import ssl

_MAX_FILE_BYTES = 1024 * 1024
_OTHER_KEY = "KEY_VALUES_MISMATCH"


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The files of a server that speaks TLS, in PEM. Without `ssl_certfile`, it speaks plain HTTP.

    Attributes:
        ssl_certfile: The server's certificate, followed by those of the authorities between it and the root.
        ssl_keyfile: Its private key. None: the key is in `ssl_certfile`.
        ssl_keyfile_password_file: The password of an encrypted key, alone in a file.
    """

    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_keyfile_password_file: Path | None = None

    def context(self) -> ssl.SSLContext | None:
        """Reads the files, and returns None without `ssl_certfile`. Later changes of the files have no effect.

        Raises:
            SpecError: a file is missing or invalid. Names the file.
        """
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None or self.ssl_keyfile_password_file is not None:
                raise SpecError(
                    "--ssl-keyfile", "is of no use without a certificate", "give --ssl-certfile, too"
                )
            return None
        import ssl  # Imported here because most servers speak no TLS.

        keyfile = self.ssl_keyfile or self.ssl_certfile
        if b"-----BEGIN CERTIFICATE-----" not in _read(self.ssl_certfile):
            raise SpecError(str(self.ssl_certfile), "has no certificate", "a PEM file with one")
        if b"PRIVATE KEY-----" not in _read(keyfile):
            raise SpecError(str(keyfile), "has no private key", "a PEM file with one (--ssl-keyfile)")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.ssl_certfile, keyfile, self._password)
        except ssl.SSLError as error:
            if error.reason == _OTHER_KEY:
                raise SpecError(str(keyfile), f"is not the key of {self.ssl_certfile}") from error
            raise SpecError(
                f"{self.ssl_certfile}, {keyfile}",
                f"cannot be used: {(error.reason or 'unknown').lower().replace('_', ' ')}",
                "a certificate and its key in PEM, and the right password if the key has one",
            ) from error
        return context

    def _password(self) -> bytes:
        """Returns the password. OpenSSL calls this for encrypted keys only; otherwise it would ask on the terminal."""
        if self.ssl_keyfile_password_file is None:
            raise SpecError(
                str(self.ssl_keyfile or self.ssl_certfile),
                "is encrypted",
                "give its password with --ssl-keyfile-password-file",
            )
        return _read(self.ssl_keyfile_password_file).rstrip(b"\r\n")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise SpecError(str(path), f"is larger than {_MAX_FILE_BYTES} bytes")
    return content
