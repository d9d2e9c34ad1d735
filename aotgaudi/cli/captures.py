"""The output of ``explain`` and ``diff`` about captures of wrapped servers, and about caches of a plain vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.bundle.launch import Launch
from aotgaudi.cli.options import StorePlace
from aotgaudi.cli.show import first_lines
from aotgaudi.commands.flags import CONDITIONS
from aotgaudi.errors import NotWarmError, SpecError, counted
from aotgaudi.wrap.capture_records import capture_key, find_capture
from aotgaudi.wrap.compile_cache import FACTORS_NAME, CompileCache, find_compile_caches
from aotgaudi.wrap.launch import describe_here
from aotgaudi.wrap.launch_comparison import (
    CaptureDifference,
    Comparison,
    Difference,
    capture_difference,
    compare,
)
from aotgaudi.wrap.observe import explain_run

Told = tuple[dict[str, Any], list[str], int]


def explain_launch(
    path: Path,
    words: tuple[str, ...],
    environ: Mapping[str, str],
    place: StorePlace,
    run_root: Path | None = None,
) -> Told:
    """Returns a JSON value, the same in lines for people, and the exit code with which this launch would be refused.

    Args:
        path: The bundle of a wrapped server.
        words: The server's command; () means the sealed one.
        environ: The environment that the command would start in.
        place: The store, which may know how long a cold start takes.
        run_root: The --root of a past run. If it is given, that run is explained and not the command.

    Raises:
        StoreError: The bundle or the store cannot be read.
        SpecError: `path` is not a bundle, or the command starts no server that can be wrapped.
        TargetError: The command's interpreter or its device is missing.
    """
    if not (path / INDEX_NAME).is_file():
        raise SpecError(
            str(path), "is not a bundle", "make one with: aotgaudi build capture -o DIR -- COMMAND"
        )
    bundle = open_bundle(path)
    return _of_bundle(bundle, words, environ, place) if run_root is None else _of_run(bundle, run_root)


def _of_bundle(bundle: Bundle, words: tuple[str, ...], environ: Mapping[str, str], place: StorePlace) -> Told:
    sealed = bundle.launch
    found, here = describe_here(sealed, words, environ)
    result = compare(sealed, here, found.adapter.variable_rules)
    document = {
        "bundle": str(bundle.path),
        "sealed": sealed.id,
        "here": here.id,
        "num_components": len(sealed.components()),
        "warm": result.is_same,
        "cold_seconds": None if result.is_same else _cold_seconds(sealed, place),
        "exit_code": result.exit_code,
        "components": difference_rows(result.components),
        "conditions": difference_rows(result.unmet),
        "established": difference_rows(result.established),
    }
    return document, list(_comparison_lines(document, result)), result.exit_code


def _of_run(bundle: Bundle, root: Path) -> Told:
    found = explain_run(root, bundle.require_capture().factors)
    document = {
        "bundle": str(bundle.path),
        "run": str(root),
        "num_processes": found.num_processes,
        "num_factors": found.num_factors,
        "factors": [{"name": one.name, "sealed": one.sealed, "here": one.here} for one in found.factors],
        "deeds": list(found.deeds),
    }
    lines = [
        f"{root}: {found.num_processes} processes, {found.num_factors} factors hashed, {len(found.factors)} differ"
    ]
    code = NotWarmError.exit_code if found.factors or found.deeds else 0
    return document, [*lines, *difference_table(found.factors), *found.deeds], code


def explain_compile_caches(caches: Sequence[CompileCache], against: Path | None) -> Told:
    """Explains caches of a plain vLLM: each by the one before it, or the newest by the newest in another folder.

    Raises SpecError if the other folder has none.
    """
    others = caches[1:] if against is None else find_compile_caches(against)[:1]
    if against is not None and not others:
        raise SpecError(str(against), f"has no {FACTORS_NAME}", "a folder of vLLM's torch_compile_cache")
    documents, lines = [], []
    for cache, older in zip(caches, others):  # noqa: B905 - the oldest has none before it
        found, num = cache.differences(older), len(cache.factors)
        rows = [{"name": one.name, "was": one.sealed, "is": one.here, "note": _note(one)} for one in found]
        paths = {"path": str(cache.path), "made": cache.made, "against": str(older.path)}
        documents.append({**paths, "num_factors": num, "differences": rows})
        than = older.path.name if against is None else older.path
        lines.append(f"{cache.path.name} ({cache.made}): {len(found)} of {num} factors not as in {than}")
        table = zip(difference_table(found, ("was", "is")), rows, strict=True)
        lines += [f"{line}  {row['note']}".rstrip() for line, row in table]
    if against is None:
        lines.append(f"{caches[-1].path.name} ({caches[-1].made}): the oldest")
    differs = documents and documents[0]["differences"]
    return {"comparisons": documents}, lines, NotWarmError.exit_code if differs else 0


def _note(difference: Difference) -> str:
    condition = CONDITIONS.get(difference.name.rpartition(".")[2])
    return "" if condition is None else f"(changes no code: {condition.reason})"


def difference_rows(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    """Returns differences as JSON values."""
    return [
        {"name": one.name, "sealed": one.sealed, "here": one.here, "exit_code": one.error.exit_code}
        for one in differences
    ]


def difference_table(
    differences: Iterable[Difference], titles: tuple[str, str] = ("sealed", "here")
) -> Iterator[str]:
    """Yields one line for each difference: its name, and both values."""
    rows = [(one.name, *one.shown) for one in differences]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, sealed, here in rows:
        yield f"    {name:<{widths[0]}}  {titles[0]}: {sealed:<{widths[1]}}  {titles[1]}: {here}"


def _comparison_lines(document: Mapping[str, Any], result: Comparison) -> Iterator[str]:
    num, of = len(result.components), document["num_components"]
    if result.is_same:
        yield f"warm: all {of} components of the launch are those that were sealed"
    elif num:
        yield f"not warm: {num} of {of} components of the launch {'differs' if num == 1 else 'differ'}"
    else:
        yield f"not warm: the launch is the sealed one, but {len(result.unmet)} of its conditions cannot be met here"
    yield from difference_table(result.components)
    if result.unmet:
        yield "conditions that cannot be made what they were:"
        yield from difference_table(result.unmet)
    if result.established:
        yield "conditions that `aotgaudi run` makes what they were:"
        yield from difference_table(result.established)
    if document["cold_seconds"] is not None:
        yield f"cost: a cold start, which took {document['cold_seconds']:.0f} s when it was built"


def _cold_seconds(sealed: Launch, place: StorePlace) -> float | None:
    """Returns how long the sealed launch took to start in the build; None if this machine's store does not know."""
    if not place.root.is_dir():
        return None
    row = find_capture(place.open(create=False), capture_key(sealed).hex)
    return None if row is None else row.cold_seconds


_SHOWN_FILES = 10


def diff_captures(old: Path, new: Path) -> tuple[dict[str, Any], list[str], bool]:
    """Returns the differences as a JSON value and in lines for people, and whether there are any.

    Raises like opening a bundle, and SpecError if one of the bundles holds no capture.
    """
    before, after = open_bundle(old), open_bundle(new)
    found = capture_difference(before, after)
    document = {
        "a": {"path": str(old), "launch": before.launch.id},
        "b": {"path": str(new), "launch": after.launch.id},
        "different": bool(found),
        "components": difference_rows(found.launches.components),
        "conditions": difference_rows([*found.launches.unmet, *found.launches.established]),
        "files": {"added": found.added, "removed": found.removed, "changed": found.changed},
    }
    return document, list(_difference_lines(found)) if found else ["no difference"], bool(found)


def _difference_lines(found: CaptureDifference) -> Iterator[str]:
    conditions = (*found.launches.unmet, *found.launches.established)
    for title, differences in (("launch", found.launches.components), ("conditions", conditions)):
        if differences:
            yield f"{title}:"
            yield from difference_table(differences, ("A", "B"))
    if not found.num_files:
        return
    yield "files:"
    for verb, paths in (("added", found.added), ("removed", found.removed), ("changed", found.changed)):
        if paths:
            yield f"    {counted(len(paths), 'file')} {verb}"
            indented = [f"        {path}" for path in paths]
            yield from first_lines(indented, _SHOWN_FILES, "        and {} more (--json)")
