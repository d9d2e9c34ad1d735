"""A job on a node that does not share the builder's store: what it needs and what it gives go through a remote.

What a job needs (the text of a unit) is put there before it starts, and what it gives (objects, then the record) before
it is done. Neither side believes the other: objects are hashed as they come, and records checked. A node's own store
is scratch, kept for what the node may be asked again.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from aotgaudi.compile.jobs import (
    BuildJob,
    Built,
    Busy,
    CompileJob,
    Row,
    TraceJob,
    build_once,
    find_row,
    key_of,
)
from aotgaudi.compile.records import ProgramRow, UnitRow
from aotgaudi.compile.share import pull_row, push_rows, receive_object
from aotgaudi.digest import Digest, sha256_bytes
from aotgaudi.errors import StoreError
from aotgaudi.share.locations import open_remote
from aotgaudi.share.remote import Remote
from aotgaudi.share.transfer import Conduct, Sources, send
from aotgaudi.store.store import Store

_CONDUCT = Conduct(num_threads=4)


def offer(job: BuildJob, store: Store, remote: Remote) -> None:
    """Puts what `job` needs from `store` into `remote`. Raises as `transfer.send` does."""
    if isinstance(job, CompileJob):
        digest = Digest.parse(job.text)
        send(remote, {digest: store.objects.path(digest)}, _CONDUCT)


def collect(job: BuildJob, store: Store, remote: Remote) -> Row:
    """Brings what `job` gave on a node from `remote` into `store`. Raises StoreError where it is not there."""
    _pull(job, store, Sources([remote], _CONDUCT))
    row = find_row(store, job)
    if row is None:
        raise StoreError(
            f"{remote.label} does not have what {job.label} gave (is it the same place for all nodes?)"
        )
    return row


def build_through(job: BuildJob, url: str) -> Built | Busy:
    """In a worker on a node: does `build_once` in this node's own store; texts come, and rows go, by way of `url`."""
    remote = open_remote(url).remote
    store = Store.open(_scratch_store(url))
    sources = Sources([remote], _CONDUCT)
    here = replace(job, store_root=store.root, log_path=store.root / "logs" / job.log_path.name, lower=())
    with store.in_use():
        if _pull(job, store, sources):
            row = find_row(store, job)
            if row is not None:
                return Built(row, is_new=False)
        if isinstance(job, CompileJob):
            receive_object(Digest.parse(job.text), store, sources)
        built = build_once(here)
        if isinstance(built, Built):
            push_rows({key_of(job): built.row}, store, remote, _CONDUCT)
        return built


def _pull(job: BuildJob, store: Store, sources: Sources) -> bool:
    if isinstance(job, TraceJob):
        return pull_row(key_of(job), ProgramRow.model_validate, store, sources)
    return pull_row(key_of(job), UnitRow.model_validate, store, sources)


def _scratch_store(url: str) -> Path:
    """This machine's own store for what is exchanged at `url`; of this user alone."""
    root = Path(tempfile.gettempdir()) / f"aotgaudi-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    return root / f"node-{sha256_bytes(url.encode())[:16]}"
