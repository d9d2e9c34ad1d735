"""What commands about a manifest take: a manifest, spec or bundle, ``--entry``, and ``--target`` for another machine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import click
import pydantic

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.cli.options import path_option
from aotgaudi.document import first_problem
from aotgaudi.entries import Entry
from aotgaudi.errors import ManifestError, SpecError
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec
from aotgaudi.spec.build_spec import BuildSpec

_HEX = re.compile(r"[0-9a-f]{6,32}")
_PATTERN = re.compile(r"[*?\[]")
_WRITTEN_BY = "what `aotgaudi doctor --hpu --write-target FILE` wrote on a Gaudi"


def load_manifest_of(path: Path) -> Manifest:
    """Returns the manifest of a bundle of programs, or the manifest in a file, or that of a spec.

    Raises like `open_bundle` and `load_manifest_or_spec`.
    """
    if (path / INDEX_NAME).is_file():
        bundle = open_bundle(path)
        bundle.require_programs()
        return bundle.manifest
    return load_manifest_or_spec(path)


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


# Targets (docs/formats/target.md)


def read_target(path: Path, remedy: str) -> Target:
    """Returns the target that a file describes. Raises SpecError with `remedy`."""
    try:
        return Target.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", remedy) from error
    except pydantic.ValidationError as error:
        raise SpecError(str(path), f"does not describe a machine: {first_problem(error)}", remedy) from error


def refuse_other_target(described: Target | None, *specs: BuildSpec) -> None:
    """Raises SpecError unless the given target is one of all `specs`. For commands on which it has no effect."""
    from aotgaudi.backends.offline import find_target  # Few calls of these commands need it.

    if described is not None:
        for spec in specs:
            find_target(spec.target, described)


def _to_target(context: click.Context, parameter: click.Parameter, path: Path | None) -> Target | None:
    return None if path is None or context.resilient_parsing else read_target(path, _WRITTEN_BY)


def _refuse(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and not context.resilient_parsing:
        from aotgaudi.backends.offline import HPU_NEEDS

        raise SpecError("--target", f"plans, and compiles nothing: {HPU_NEEDS}", "leave it out")


planned_target_option = path_option(
    "--target",
    "described",
    callback=_to_target,
    metavar="FILE",
    help=f"For an hpu spec, where there is no Gaudi: {_WRITTEN_BY}.",
)
"""``--target FILE`` of a Gaudi. The command gets `described`, a `Target`, or None for this machine."""

refused_target_option = click.option(
    "--target",
    hidden=True,
    expose_value=False,
    callback=_refuse,
    help="Refused: says what compiling takes.",
)
"""``--target FILE`` of a command that compiles, which refuses it and says what compiling takes."""
