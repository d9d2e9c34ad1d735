"""What ``aotgaudi explain`` says of wrapped servers: a command against a sealed launch, or against a cache of vLLM's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.bundle.launch import Launch
from aotgaudi.bundle.sealed import capture_of
from aotgaudi.cli.options.store import StorePlace
from aotgaudi.errors import SpecError
from aotgaudi.wrap.adapters.compare import Comparison, Difference, compare
from aotgaudi.wrap.adapters.describe import describe_here
from aotgaudi.wrap.adapters.found import find_guest
from aotgaudi.wrap.explain.cache_findings import examine
from aotgaudi.wrap.explain.plain_cache import PlainCache, find_plain_cache, read_plain_cache
from aotgaudi.wrap.explain.run_factors import explain_run

Told = tuple[dict[str, Any], list[str], int]
_EXIT_NOT_WARM = 3


def is_of_launch(path: Path) -> bool:
    """Returns whether a path is a bundle of a wrapped server, or a cache of vLLM's."""
    if not path.is_dir():
        return False
    if (path / INDEX_NAME).is_file():
        return isinstance(open_bundle(path).receipt, CaptureReceipt)
    return find_plain_cache(path) is not None


def explain_launch(
    path: Path,
    words: tuple[str, ...],
    environ: Mapping[str, str],
    place: StorePlace,
    run_root: Path | None = None,
) -> Told:
    """Returns what is to be said, as a JSON value and in lines for people, and what refusing it would exit with.

    Args:
        path: a bundle of a wrapped server, or a cache of vLLM's.
        words: the server's command; () is the sealed one.
        environ: the environment that it would be started in.
        place: where the store is that may know what a cold start takes.
        run_root: the place of a run of the bundle, to explain that in place of a command.

    Raises:
        StoreError: the bundle, or the store, cannot be read.
        SpecError: neither a bundle nor a cache is at `path`; or the command starts no server that can be wrapped.
        TargetError: the command's interpreter, or its device, is not there.
    """
    if run_root is not None:
        return _of_run(open_bundle(path), run_root)
    if (path / INDEX_NAME).is_file():
        return _of_bundle(open_bundle(path), words, environ, place)
    root = find_plain_cache(path.absolute())
    if root is None:
        raise SpecError(
            str(path), "is neither a bundle of a wrapped server nor a cache of vLLM's", "~/.cache/vllm"
        )
    return _of_cache(read_plain_cache(root), words, environ)


def _of_bundle(bundle: Bundle, words: tuple[str, ...], environ: Mapping[str, str], place: StorePlace) -> Told:
    sealed = bundle.launch
    found, here = describe_here(sealed, words, environ)
    result = compare(sealed, here, found.guest.variable_rules)
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
    return document, list(_lines(document, result)), result.exit_code


def _of_run(bundle: Bundle, root: Path) -> Told:
    found = explain_run(root, capture_of(bundle).factors)
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
    rows = (Difference(one.name, one.sealed, one.here) for one in found.factors)
    code = _EXIT_NOT_WARM if found.factors or found.deeds else 0
    return document, [*lines, *difference_table(rows), *found.deeds], code


def difference_rows(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    """Returns differences as JSON values."""
    return [
        {"name": one.name, "sealed": one.sealed, "here": one.here, "exit_code": one.exit_code}
        for one in differences
    ]


def difference_table(
    differences: Iterable[Difference], titles: tuple[str, str] = ("sealed", "here")
) -> Iterator[str]:
    """Yields a line a difference: what it is of, and what both sides have."""
    rows = [(one.name, *one.shown) for one in differences]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, sealed, here in rows:
        yield f"    {name:<{widths[0]}}  {titles[0]}: {sealed:<{widths[1]}}  {titles[1]}: {here}"


def _lines(document: Mapping[str, Any], result: Comparison) -> Iterator[str]:
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
    """Returns how long the sealed launch took to start when it was built; None if this machine's store does not say."""
    if not place.root.is_dir():
        return None
    from aotgaudi.wrap.capture.keys import capture_key
    from aotgaudi.wrap.capture.records import find_capture

    row = find_capture(place.open(create=False), capture_key(sealed).hex)
    return None if row is None else row.cold_seconds


def _of_cache(cache: PlainCache, words: tuple[str, ...], environ: Mapping[str, str]) -> Told:
    found = find_guest(words, environ) if words else None
    findings = examine(cache, found)
    document = {
        "cache": str(cache.path),
        "num_files": cache.num_files,
        "num_bytes": cache.num_bytes,
        "architectures": list(cache.architectures),
        "artifacts": [
            {
                "path": str(one.path),
                "rank": one.rank,
                "num_bytes": one.size_bytes,
                "torch": one.torch,
                "python": one.python,
                "made_in": one.place,
                "site_packages": one.site_packages,
            }
            for one in cache.artifacts
        ],
        "misses": [one.text for one in findings if one.is_miss],
        "notes": [one.text for one in findings if not one.is_miss],
    }
    return (
        document,
        list(_cache_lines(document, is_asked=bool(words))),
        _EXIT_NOT_WARM if document["misses"] else 0,
    )


def _cache_lines(document: Mapping[str, Any], *, is_asked: bool) -> Iterator[str]:
    yield f"{document['cache']}: {document['num_files']} files, {document['num_bytes'] / 1e6:.1f} MB; nothing was loaded"
    for one in document["artifacts"]:
        made = f"torch {one['torch'] or '?'}, Python {one['python'] or '?'}"
        yield f"    {Path(one['path']).parents[1].name[:10]} rank {one['rank']}: {one['num_bytes'] / 1e6:.1f} MB, {made}"
    yield from (f"miss: {text}" for text in document["misses"])
    yield from (f"note: {text}" for text in document["notes"])
    if not is_asked:
        yield f"for a command: aotgaudi explain {document['cache']} -- vllm serve ..."
    elif not document["misses"]:
        yield "nothing was found that would keep it from being used"
