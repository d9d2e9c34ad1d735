"""Options of commands that build: which entries, on which workers, and who signs the bundle."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import click

from aotgaudi.bundle.signing import Signing, SigningKey, load_signing_key
from aotgaudi.cli.options import ABOVE_ZERO, POSITIVE, option, options_of, said
from aotgaudi.cli.show import size_text
from aotgaudi.compile.pipeline import Workers
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS
from aotgaudi.entries import Entry
from aotgaudi.errors import ManifestError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.share.remote_cache import Sharing, Traffic

_HEX = re.compile(r"[0-9a-f]{6,32}")
_PATTERN = re.compile(r"[*?\[]")

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
        default=None,
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

# Single entries

entry_option = click.option(
    "--entry",
    "entry_texts",
    multiple=True,
    metavar="ENTRY",
    help='Only this: "(decode, 1, 1, 1)", "(prompt, *, 128, *)", or the first 6 digits of an id (repeatable).',
)
"""``--entry ENTRY``, repeatable. The command gets `entry_texts`, for `find_entries`."""


def find_entries(manifest: Manifest, texts: Sequence[str]) -> tuple[Entry, ...]:
    """Returns the entries that any of `texts` names, in the manifest's order; all entries if there is no text.

    A text is one of these: a printed entry, ``(prompt, 1, 64, 0)`` or ``prompt 1 64 0``; such a text with patterns as values
    (``*``, ``?``, ``[12]``), which names every entry that matches; or an id, or at least its first 6 digits.

    Raises ManifestError for a text that names nothing, or that begins several ids.
    """
    if not texts:
        return manifest.entries
    named = {entry.id for text in texts for entry in _find(manifest, text)}
    return tuple(entry for entry in manifest.entries if entry.id in named)


def _find(manifest: Manifest, text: str) -> list[Entry]:
    wanted = _words(text)
    if _PATTERN.search(text):
        found = [entry for entry in manifest.entries if any(_matches(form, wanted) for form in _forms(entry))]
    else:
        found = [entry for entry in manifest.entries if wanted in _forms(entry)]
    if not found and _HEX.fullmatch(text.strip().lower()):
        found = [entry for entry in manifest.entries if entry.id.startswith(text.strip().lower())]
        if len(found) > 1:
            raise ManifestError(f"{text!r} is the start of {len(found)} entries' ids: give more digits")
    if not found:
        raise ManifestError(f"the manifest has no entry {text!r} ({_hint(manifest, wanted)})")
    return found


def _matches(form: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    return len(form) == len(wanted) and all(map(fnmatchcase, form, wanted))


def _forms(entry: Entry) -> tuple[tuple[str, ...], ...]:
    """Returns the words of an entry as printed, and with all of its columns, of which a sampler prints fewer."""
    return _words(str(entry)), tuple(str(value).lower() for value in (entry.kind, *entry.row()))


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.sub(r"[(),]", " ", text).lower().split())


def _hint(manifest: Manifest, wanted: tuple[str, ...]) -> str:
    kinds = list(dict.fromkeys(entry.kind for entry in manifest.entries))
    kind = wanted[0] if wanted and wanted[0] in kinds else ""
    if not kind:
        example = f", e.g. {manifest.entries[0]}" if kinds else ""
        return f"it has {', '.join(kinds) or 'none at all'} entries{example}"
    names = [str(entry) for entry in manifest.of_kind(kind)]
    near = difflib.get_close_matches(f"({', '.join(wanted)})", names, n=3, cutoff=0) or names[:3]
    return f"near: {'; '.join(near)}"
