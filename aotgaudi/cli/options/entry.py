"""Entries as a person names them: as they are printed, with ``*`` for any value, or by the first digits of an id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import click

from aotgaudi.entries import Entry
from aotgaudi.errors import ManifestError
from aotgaudi.manifest.manifest import Manifest

_HEX = re.compile(r"[0-9a-f]{6,32}")
_PATTERN = re.compile(r"[*?\[]")


def entry_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--entry ENTRY``, repeatable; the command gets ``entry_texts``, for `find_entries`."""
    return click.option(
        "--entry",
        "entry_texts",
        multiple=True,
        metavar="ENTRY",
        help='Only this: "(decode, 1, 1, 1)", "(prompt, *, 128, *)", or the first 6 digits of an id (repeatable).',
    )(function)


def find_entries(manifest: Manifest, texts: Sequence[str]) -> tuple[Entry, ...]:
    """Returns the entries that any of `texts` names, in the manifest's order; all of them if there is no text.

    A text is an entry as it is printed, ``(prompt, 1, 64, 0)`` or ``prompt 1 64 0``; such a text with patterns in place
    of values (``*``, ``?``, ``[12]``), which names every entry that matches; or an id, or at least its first 6 digits.

    Raises ManifestError for a text that names nothing, or is the start of several ids.
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
    """The words of an entry as it is printed, and with all of its columns (a sampler's print fewer)."""
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
