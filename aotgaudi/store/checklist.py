"""What the index remembers: of a whole look-up that found everything, the files that answered it.

The next look-up of the same keys then reads no record: it looks whether those files are still there, the same
ones, of the same size. That is as much as a look-up ever knows of objects, whose bytes are verified when they are
used. A checklist is only ever filled from records; without it, or with a wrong one, records are read.

One row of the index is ``{"records": {key: [inode, size]}, "objects": {sha256: size}}``, under the sha256 of the
layers and the keys that were looked up, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import StoreError
from aotgaudi.store.store import Store

MOST_CHECKLISTS = 16
"""How many are kept, the ones last written: one a manifest that is being worked on, and some."""

_LOG = logging.getLogger(__name__)


def is_checked_off(store: Store, keys: Sequence[str]) -> bool:
    """Whether `keys` were remembered, and every file that answered them is still there. Notes their use."""
    if store.index is None:
        return False
    try:
        found = store.index.get(_name(store, keys))
    except StoreError as error:
        _LOG.warning("no use is made of the index: %s", error)
        return False
    match found:
        case {"records": dict(records), "objects": dict(objects)} if records.keys() >= set(keys):
            return _are_objects_there(store, objects) and _are_records_there(store, records)
    return False


def remember(store: Store, keys: Sequence[str], more: Iterable[str], objects: Iterable[Digest]) -> None:
    """Remembers that the records of `keys`, `more` records (by key) and `objects` are all there. Notes their use."""
    if store.index is None:
        store.actions.note_use((*keys, *more))
        return
    stamps = {key: store.actions.stamp(key) for key in (*keys, *more)}
    found = {key: [stamp.inode, stamp.size_bytes] for key, stamp in stamps.items() if stamp is not None}
    if len(found) < len(stamps):
        return  # Collected meanwhile.
    row = {"records": found, "objects": {digest.sha256: digest.size_bytes for digest in objects}}
    store.actions.note_use(found)
    try:
        store.index.put(_name(store, keys), row)
        for old in list(store.index)[:-MOST_CHECKLISTS]:
            store.index.discard(old)
    except StoreError as error:
        _LOG.warning("the index is not written: %s", error)


def _name(store: Store, keys: Sequence[str]) -> str:
    layers = [str(path) for path in (store.root, *store.lower)]
    return sha256_bytes(canonical_json(["aotgaudi.checklist/1", layers]) + "\n".join(keys).encode())


def _are_objects_there(store: Store, objects: dict[str, Any]) -> bool:
    return all(store.objects.has(Digest(sha256, size)) for sha256, size in objects.items())


def _are_records_there(store: Store, records: dict[str, Any]) -> bool:
    stale = []
    for key, identity in records.items():
        stamp = store.actions.stamp(key)
        if stamp is None or [stamp.inode, stamp.size_bytes] != identity:
            return False
        if store.actions.is_use_due(stamp):
            stale.append(key)
    store.actions.note_use(stale)
    return True
