"""Options of commands that build: on which workers, with which remote, and who signs the bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from aotgaudi.bundle.signing import Signing, SigningKey, load_signing_key
from aotgaudi.cli.options import ABOVE_ZERO, POSITIVE, option, options_of, said
from aotgaudi.cli.show import size_text
from aotgaudi.compile.pipeline import Workers
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS
from aotgaudi.share.remote_cache import Sharing, Traffic

# Workers

worker_options = options_of(
    Workers,
    "workers",
    jobs=said(
        "Worker processes  [default: one a core; with --ray, all that the cluster has]",
        "-j",
        "--jobs",
        type=POSITIVE,
        metavar="N",
    ),
    timeout_seconds=said(
        f"How long a unit may take before its worker is replaced  [default: {UNIT_TIMEOUT_SECONDS:.0f}]",
        "--timeout",
        type=ABOVE_ZERO,
        metavar="SECONDS",
    ),
    ray=said(
        "Build on this Ray cluster: HOST:PORT, auto, or local (one on this machine).", metavar="ADDRESS"
    ),
)
"""Where a build's jobs run. The command gets `workers`, a `Workers`."""

# Remotes


@dataclass(frozen=True)
class RemoteOptions:
    """The remote that is looked into, and whether results are uploaded to it."""

    remote: str | None = option(
        "Look there for what the store lacks: s3://BUCKET/PREFIX, https://HOST/DIR, /DIR, ...",
        envvar="AOTGAUDI_REMOTE",
        metavar="URL",
    )
    push: bool = option(
        "Upload to --remote what it lacks: results as they are made, and what the store has for this.",
        default=False,
    )

    def sharing(self) -> Sharing | None:
        """Returns how results are shared; None without a remote. Raises UsageError, SpecError."""
        if self.remote is None:
            if self.push:
                raise click.UsageError("--push needs --remote URL (or AOTGAUDI_REMOTE), where to upload to")
            return None
        return Sharing(self.remote, self.push)


remote_options = options_of(RemoteOptions, "sharing", made=RemoteOptions.sharing)
"""``--remote`` and ``--push``. The command gets `sharing`, a `Sharing`, or None."""


def remote_line(found: Traffic, *others: str) -> str:
    """Returns what a remote gave and got, for people, and between that `others`."""
    sent = f" ({size_text(found.uploaded_bytes)})" if found.num_uploaded else ""
    parts = (
        f"{found.num_here} results were here",
        f"{found.num_fetched} fetched ({size_text(found.fetched_bytes)} in {found.fetch_seconds:.1f} s)",
        *others,
        f"{found.num_uploaded} results uploaded{sent}",
    )
    return f"{found.remote}: {', '.join(parts)}"


# Signatures


@dataclass(frozen=True)
class SigningOptions:
    """The keys that sign."""

    sign_keys: tuple[Path, ...] = option(
        "Sign the bundle with this private key (repeatable; `aotgaudi key generate`).",
        "--sign-key",
        default=(),
        metavar="FILE",
    )

    def keys(self) -> tuple[SigningKey, ...]:
        """Reads the keys. Raises SpecError and UntrustedError."""
        return tuple(load_signing_key(path) for path in self.sign_keys)

    def signing(self) -> Signing | None:
        """Returns what signs a new bundle; None for no signature. Raises like `keys`."""
        return Signing(self.keys()) if self.sign_keys else None


signing_options = options_of(SigningOptions, "signing", made=SigningOptions.signing)
"""``--sign-key``. The command gets `signing`, a `Signing`, or None."""
