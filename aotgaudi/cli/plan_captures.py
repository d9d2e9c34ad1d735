"""What ``build plan --what-if`` says of captures: which would be built anew, and what that took the last time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.launch import Launch
from aotgaudi.cli.show import counted
from aotgaudi.errors import AotGaudiError
from aotgaudi.store.store import Store
from aotgaudi.wrap.capture_records import capture_key, captures, find_capture, read_documents
from aotgaudi.wrap.explain import BuiltCapture, Rebuilt, rebuilt


def built_captures(bundle_path: Path | None, store: Store | None) -> tuple[BuiltCapture, ...]:
    """Returns the capture of a bundle, or, where no bundle is named, every one that the store has."""
    if bundle_path is not None:
        launch = open_bundle(bundle_path).launch
        row = None if store is None else find_capture(store, capture_key(launch).hex)
        return (_of(launch, None if row is None else row.build_seconds),)
    return tuple(_recorded(store)) if store is not None else ()


def told_of_captures(
    settings: Sequence[str], built: tuple[BuiltCapture, ...]
) -> tuple[dict[str, Any], list[str]]:
    """Returns what the settings would have built anew, as a JSON value and in lines. Raises SpecError for a bad setting."""
    found = rebuilt(settings, built)
    document = {
        "num_captures": len(built),
        "captures": [
            {
                "launch": one.capture.launch_id,
                "model": one.capture.label,
                "seconds": one.capture.seconds,
                "changes": [{"component": n, "old": old, "new": new} for n, old, new in one.changes],
            }
            for one in found
        ],
    }
    return document, list(_lines(found, len(built)))


def _of(launch: Launch, seconds: float | None) -> BuiltCapture:
    return BuiltCapture(launch.id, launch.model.name, dict(launch.components()), seconds)


def _recorded(store: Store) -> Iterator[BuiltCapture]:
    for _, row in captures(store):
        try:
            launch, _ = read_documents(store, row)
        except AotGaudiError:
            continue  # Its documents are damaged: it will be built again whatever changes.
        yield _of(launch, row.build_seconds)


def _lines(found: Sequence[Rebuilt], num_captures: int) -> Iterator[str]:
    if not num_captures:
        yield "the store has no captures"
        return
    yield f"{len(found)} of {counted(num_captures, 'capture')} would be built anew"
    for one in found:
        took = "" if one.capture.seconds is None else f", which took {one.capture.seconds:.0f} s"
        yield f"  {one.capture.launch_id[:12]}  {one.capture.label}{took}"
        yield from (f"      {name}: {old} -> {new}" for name, old, new in one.changes)
    timed = [one.capture.seconds for one in found if one.capture.seconds is not None]
    if len(timed) > 1:
        yield f"together {sum(timed):.0f} s, one after the other"
