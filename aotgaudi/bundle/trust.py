"""Decides which bundles may be used, by the owners of their files and by signatures.

A trusted key is an ed25519 public key in a PEM file (SubjectPublicKeyInfo). We verify the signatures before we parse
anything else of a bundle. The envelope is read once. We parse the payload that was verified, and its statement must name
exactly the bytes of the index that we read. Key ids are only shown to people. We try every signature with every trusted key.

`cryptography` does the mathematics. securesystemslib, which signs, selects keys by id when it verifies, and imports other
installed packages (boto3, for example), so it is used offline only. To keep the start of `aotgaudi serve` fast, this module
imports the formats and `cryptography` only when there is something to verify.

Owners and modes of a file are checked through its descriptor, after it is opened and before it is read. Then no other user
can change its bytes after we have verified them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import ManifestError, SpecError, UntrustedError, store_errors
from aotgaudi.files import Examine, accept_any, open_regular
from aotgaudi.store.location import replaceable_in

if TYPE_CHECKING:
    from aotgaudi.bundle.signature import Envelope, Statement


_ALLOW = "allow it with --allow-unsafe-permissions"


@dataclass(frozen=True, slots=True)
class OwnerRule:
    """Accepts files that belong to `uid` or root and that nobody else may write to, except the group with `trusts_group`."""

    uid: int
    trusts_group: bool = False

    def check(self, path: Path, status: os.stat_result) -> None:
        """Raises UntrustedError, with `path` and the remedy, unless the rule accepts `status`."""
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in (0, self.uid):
            who = f"root, or to uid {self.uid}" if self.uid else "root"
            raise UntrustedError(
                f"{path} belongs to uid {status.st_uid}, who can change it; it must belong to {who}"
                f" (chown -R {self.uid} {path}, or {_ALLOW})"
            )
        if mode & (stat.S_IWOTH if self.trusts_group else stat.S_IWGRP | stat.S_IWOTH):
            who = "everybody" if mode & stat.S_IWOTH else "its group"
            raise UntrustedError(
                f"{path} can be written to by {who} (mode {mode:04o}) (chmod -R go-w {path}, or {_ALLOW})"
            )
        if mode & stat.S_ISVTX:
            raise UntrustedError(
                f"{path} is sticky (mode {mode:04o}), as shared directories are (chmod -R -t {path}, or {_ALLOW})"
            )

    def check_parents(self, path: Path) -> None:
        """Raises UntrustedError if anybody may replace `path` by something else, and OSError."""
        parent = replaceable_in(path)
        if parent is not None:
            raise UntrustedError(
                f"everybody may replace {path}, for everybody may write to {parent}"
                f" (chmod o-w {parent}, or +t, or {_ALLOW})"
            )


def check_directories(root: Path, on_the_way: Iterable[Path], rule: OwnerRule) -> None:
    """Checks `root`, the directories above it, and those `on_the_way` to its objects. Links are not followed.

    Files are checked when they are opened, and `verify_bundle` refuses all others. Raises UntrustedError, and StoreError if
    the system does not let us look.
    """
    with store_errors("look at", root):
        rule.check(root, root.stat())
        rule.check_parents(root)
        for path in on_the_way:
            with contextlib.suppress(
                FileNotFoundError, NotADirectoryError
            ):  # Verifying reports what is missing.
                status = path.lstat()
                if not stat.S_ISLNK(status.st_mode):
                    rule.check(path, status)


KEY_REMEDY = "make a pair with: aotgaudi key generate FILE"
_MAX_KEY_BYTES = 64 << 10


@dataclass(frozen=True)
class TrustPolicy:
    """Which bundles may be used. Without `owners`, files of all owners are accepted; without `keys`, unsigned bundles."""

    owners: OwnerRule | None = None
    keys: frozenset[TrustedKey] = frozenset()

    @classmethod
    def demanding(
        cls,
        trusted_keys: Iterable[str | os.PathLike[str]] = (),
        *,
        allow_unsafe_permissions: bool = False,
    ) -> TrustPolicy:
        """Returns the policy of ``aotgaudi verify`` and ``aotgaudi serve``.

        Args:
            trusted_keys: Public keys (PEM files), one of which must have signed. Without any, unsigned bundles are accepted.
            allow_unsafe_permissions: Accept files that users other than this one and root own or may write to.

        Raises:
            SpecError: a file holds no public key.
        """
        owners = None if allow_unsafe_permissions else OwnerRule(os.geteuid())
        return cls(owners, frozenset(load_trusted_key(Path(path)) for path in trusted_keys))

    def require_signature(self, signature: bytes | None, index_bytes: bytes, path: Path) -> Statement | None:
        """Returns the statement that trusted keys signed about the index; None if not required.

        Raises UntrustedError of one line.
        """
        if not self.keys:
            return None
        if signature is None:
            raise UntrustedError(
                f"bundle {path} is not signed, and a trusted key is demanded"
                f" (sign it: aotgaudi sign {path} --sign-key FILE)"
            )
        from aotgaudi.bundle.signature import load_envelope, load_statement

        try:
            envelope = load_envelope(signature)
            _require_signer(envelope, self.keys)
            statement = load_statement(envelope.payload)
        except (ManifestError, UntrustedError) as error:
            raise UntrustedError(f"bundle {path} is not to be trusted: {error}") from error
        found = sha256_bytes(index_bytes)
        if statement.index_sha256 != found:
            raise UntrustedError(
                f"bundle {path} is not what was signed: its index has sha256 {found[:12]}...,"
                f" the signature is of {statement.index_sha256[:12]}... (it was edited, or is another bundle's)"
            )
        return statement

    @property
    def examine(self) -> Examine:
        """A function that checks a file of the bundle before it is read. It raises UntrustedError."""
        return accept_any if self.owners is None else self.owners.check

    @property
    def model_owners(self) -> OwnerRule | None:
        """The rule for owners of a model directory. It is that of bundles, but the group may write, as for a store."""
        return None if self.owners is None else OwnerRule(self.owners.uid, trusts_group=True)


ANY_BUNDLE = TrustPolicy()


def _require_signer(envelope: Envelope, keys: frozenset[TrustedKey]) -> None:
    from aotgaudi.bundle.signature import PAYLOAD_TYPE

    if envelope.payload_type != PAYLOAD_TYPE:
        raise UntrustedError(
            f"the signature is over {envelope.payload_type!r:.100}, should be {PAYLOAD_TYPE!r}"
        )
    signed = envelope.signed_bytes()
    if any(key.has_signed(row.value, signed) for key in keys for row in envelope.signatures):
        return
    trusted = {key.key_id for key in keys}
    named = sorted({row.key_id for row in envelope.signatures})
    if trusted.intersection(named):
        hint = (
            "a signature names a trusted key and was not made by it: forged, or what was signed was changed"
        )
    else:
        hint = f"signed by {_short(named)}; trusted: {_short(sorted(trusted))}"
    raise UntrustedError(f"no trusted key has signed it ({hint})")


def require_match(statement: Statement, expected: Statement, bundle: Path) -> None:
    """Raises UntrustedError, which names the field, unless the signed statement describes exactly this bundle."""
    signed, found = statement.predicate.model_dump(), expected.predicate.model_dump()
    differing = [name for name in found if signed[name] != found[name]]
    if differing or statement != expected:
        names = ", ".join(differing) or "subject"
        raise UntrustedError(f"bundle {bundle} is not what was signed: the statement has another {names}")


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """An ed25519 public key (32 bytes)."""

    raw: bytes

    @property
    def key_id(self) -> str:
        """The default key id of securesystemslib: the sha256 of the key's canonical JSON, 64 hex digits."""
        keyval = {"public": self.raw.hex()}
        return sha256_bytes(canonical_json({"keytype": "ed25519", "scheme": "ed25519", "keyval": keyval}))

    def has_signed(self, signature: bytes, data: bytes) -> bool:
        """Returns whether this key made `signature` over `data`."""
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
    return TrustedKey(key.public_bytes_raw())


def read_key_file(path: Path) -> tuple[bytes, int]:
    """Opens a key file once and returns its bytes and its permissions.

    Raises SpecError, also if the file is not a regular one, or holds several keys: whoever trusts one must see it named.
    """
    try:
        with open_regular(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", KEY_REMEDY) from error
    if len(data) > _MAX_KEY_BYTES:
        raise SpecError(str(path), "is too large for a key", KEY_REMEDY)
    num_blocks = data.count(b"-----BEGIN ")
    if num_blocks > 1:
        raise SpecError(str(path), f"holds {num_blocks} PEM blocks", "one key a file, and each file named")
    return data, mode


def _short(key_ids: list[str]) -> str:
    return ", ".join(f"{key_id:.12}..." if key_id else "an unnamed key" for key_id in key_ids[:4])
