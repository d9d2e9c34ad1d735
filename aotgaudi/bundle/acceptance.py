"""Which bundles may be used: whose files, and signed by whom. Imports little: `serve` is told before it starts anything."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aotgaudi.bundle.permissions import OwnerRule
from aotgaudi.errors import SpecError, UntrustedError
from aotgaudi.files import Examine, accept_any

if TYPE_CHECKING:
    from aotgaudi.bundle.signature import Statement
    from aotgaudi.bundle.trust import SignaturePolicy


@dataclass(frozen=True)
class TrustPolicy:
    """Which bundles may be used: `owners` None takes anybody's files, `signatures` None takes unsigned bundles."""

    owners: OwnerRule | None = None
    signatures: SignaturePolicy | None = None

    @classmethod
    def demanding(
        cls,
        trusted_keys: Iterable[str | os.PathLike[str]] = (),
        threshold: int | None = None,
        minimum_epoch: int | None = None,
        *,
        allow_unsafe_permissions: bool = False,
    ) -> TrustPolicy:
        """Returns what ``aotgaudi verify`` and ``aotgaudi serve`` demand.

        Args:
            trusted_keys: Public keys (PEM files) whose signatures count; none takes unsigned bundles.
            threshold: How many of them must have signed; None: 1.
            minimum_epoch: The oldest epoch that is accepted; None: any.
            allow_unsafe_permissions: Accept files that others than this user and root own or may write to.

        Raises:
            SpecError: a file holds no public key; or `threshold` or `minimum_epoch` is given without keys, or the keys
                cannot meet it.
        """
        owners = None if allow_unsafe_permissions else OwnerRule(os.geteuid())
        files = [Path(path) for path in trusted_keys]
        if files:
            from aotgaudi.bundle.trust import SignaturePolicy, load_trusted_key

            keys = frozenset(map(load_trusted_key, files))
            return cls(owners, SignaturePolicy(keys, 1 if threshold is None else threshold, minimum_epoch or 0))
        for name, value in (("--threshold", threshold), ("--minimum-epoch", minimum_epoch)):
            if value is not None:
                raise SpecError(name, "is about signatures", "it needs --trusted-key PEM")
        return cls(owners)

    def require_signature(self, signature: bytes | None, index_bytes: bytes, path: Path) -> Statement | None:
        """Returns what trusted keys have signed of the index; None where no key is demanded. Raises UntrustedError."""
        if self.signatures is None:
            return None
        return self.signatures.verify(_required(signature, path), index_bytes, path)

    @property
    def examine(self) -> Examine:
        """Looks at a file of the bundle before it is read. Raises UntrustedError."""
        return accept_any if self.owners is None else self.owners.check

    @property
    def model_owners(self) -> OwnerRule | None:
        """Whose model directories may be used: as for bundles, but a group may write to one, as to a store."""
        return None if self.owners is None else OwnerRule(self.owners.uid, trusts_group=True)


ANY_BUNDLE = TrustPolicy()


def _required(signature: bytes | None, path: Path) -> bytes:
    if signature is None:
        raise UntrustedError(
            f"bundle {path} is not signed, and a trusted key is demanded"
            f" (sign it: aotgaudi sign {path} --sign-key FILE)"
        )
    return signature
