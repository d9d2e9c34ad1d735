"""An entry as a person names it: its id, the first digits of that, or the form in which it is printed."""

from __future__ import annotations

import difflib
import re

from aotgaudi.entries import Entry
from aotgaudi.errors import ManifestError
from aotgaudi.manifest.manifest import Manifest

_HEX = re.compile(r"[0-9a-f]{6,32}")


def find_entry(manifest: Manifest, text: str) -> Entry:
    """Returns the entry that `text` names: ``0f3a...``, ``(prompt, 1, 64, 0)`` or ``prompt 1 64 0``.

    Raises ManifestError where there is none, or more than one.
    """
    wanted = _words(text)
    found = [entry for entry in manifest.entries if wanted in (_words(str(entry)), _all_words(entry))]
    if not found and _HEX.fullmatch(text.strip().lower()):
        found = [entry for entry in manifest.entries if entry.id.startswith(text.strip().lower())]
    if len(found) == 1:
        return found[0]
    if found:
        raise ManifestError(f"{text!r} is the start of {len(found)} entries' ids: give more digits")
    raise ManifestError(f"the manifest has no entry {text!r} ({_hint(manifest, wanted)})")


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.sub(r"[(),]", " ", text).lower().split())


def _all_words(entry: Entry) -> tuple[str, ...]:
    return tuple(str(value).lower() for value in (entry.kind, *entry.row()))


def _hint(manifest: Manifest, wanted: tuple[str, ...]) -> str:
    kinds = list(dict.fromkeys(entry.kind for entry in manifest.entries))
    kind = wanted[0] if wanted and wanted[0] in kinds else ""
    if not kind:
        example = f", e.g. {manifest.entries[0]}" if kinds else ""
        return f"it has {', '.join(kinds) or 'none at all'} entries{example}"
    names = [str(entry) for entry in manifest.of_kind(kind)]
    near = difflib.get_close_matches(f"({', '.join(wanted)})", names, n=3, cutoff=0) or names[:3]
    return f"near: {'; '.join(near)}"
