"""Turns a server's command into a sealed, proved capture. This page shows the whole sequence.

A launch that was captured before is only sealed again. Otherwise the server runs cold, its files are collected and proved,
and the result is recorded and sealed. Only one build works on a launch at a time (the store's unit lock); others wait for
its record. A build that dies leaves no bundle, no record and no lock, because the record is written after the proof, the
bundle is renamed into place, and locks end with their process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.bundle.launch import Launch
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.errors import CaptureError, counted, store_error
from aotgaudi.files import make_directories
from aotgaudi.gaudi.live_graphs import LiveGraphs
from aotgaudi.share.remote_cache import Sharing, Traffic
from aotgaudi.store.store import Store
from aotgaudi.wrap.capture_records import (
    CaptureRow,
    RowT,
    Shard,
    Sharding,
    UnprovenRow,
    capture_key,
    find_capture,
    find_unproven,
    read_documents,
    record_capture,
    record_unproven,
    shards_of,
    union,
    unproven_key,
)
from aotgaudi.wrap.collect import MIN_SECRET_BYTES, Rules, Secret, collect, require_public, secrets_of
from aotgaudi.wrap.launch import ServerCommand, weights_stamp
from aotgaudi.wrap.prove import (
    BuildContext,
    EndedEarlyError,
    Progress,
    Proved,
    RunResult,
    build_run,
    describe_counts,
    prove,
    proved_by,
)

_WAIT_SECONDS = 0.5
READY_SECONDS = 3600.0
"""How long a server may take by default until it serves."""


@dataclass(frozen=True)
class Built:
    """The result of a build: the sealed bundle, its record, whether it is new, and what a remote gave and got."""

    bundle: Bundle
    row: CaptureRow
    is_new: bool
    remote: Traffic | None = None


@dataclass(frozen=True)
class CaptureRequest:
    """What to build.

    Attributes:
        found, launch: The server's command, and what decides what it compiles.
        out: Where the bundle goes.
        signing: The keys that sign it; None for no signature.
        ready_seconds: How long a start may take until the server serves.
        given: Path below the sandbox's root -> text of files that the launch needs. They are captured with the rest.
        sharding: How several servers share the cold run; None for a single server.
        live_graphs: Whether traffic compiles graphs of a kind although all was captured.
    """

    found: ServerCommand
    launch: Launch
    out: Path
    signing: Signing | None = None
    ready_seconds: float = READY_SECONDS
    given: Mapping[str, str] = field(default_factory=dict)
    sharding: Sharding | None = None
    live_graphs: tuple[LiveGraphs, ...] = ()


def build_capture(
    request: CaptureRequest, store: Store, progress: Progress, sharing: Sharing | None = None
) -> Built:
    """Makes `request.out` a proved capture of the launch and returns it.

    Looks for it in `store`, and then at the remote of `sharing`, before it runs the server.

    Raises:
        CaptureError: The server failed, or its files could not be proved or hold a secret. Nothing is sealed.
        SpecError, UntrustedError: The sandbox cannot be used.
        StoreError: The store or the bundle cannot be written to.
    """
    refuse_foreign(request.out)
    key = capture_key(request.launch).hex
    with store.in_use(), ExitStack() as ends:
        row, remote = find_capture(store, key), None
        num_here = int(row is not None)
        if sharing is not None and (row is None or sharing.push):
            remote = ends.enter_context(sharing.open(store, progress.warn))
        if row is None and remote is not None:
            remote.look_up(key, CaptureRow.parse, record_capture).result()
            row = find_capture(store, key)
        is_new = row is None
        if row is None:
            store.require_writable()
            row, is_new = _once(
                store, key, find_capture, lambda: _build(request, store, progress, key), progress
            )
        if remote is not None:
            remote.upload(key, row)
        bundle = _seal(request, store, row)
        return Built(bundle, row, is_new, None if remote is None else remote.finish(num_here))


def _once(
    store: Store,
    key: str,
    find: Callable[[Store, str], RowT | None],
    make: Callable[[], RowT],
    progress: Progress,
) -> tuple[RowT, bool]:
    """Returns the record at `key`, and whether it was made here. Waits while another build makes it."""
    is_told = False
    while True:
        with store.locks.try_unit(key) as is_held:
            row = find(store, key)
            if row is not None:
                return row, False
            if is_held:
                return make(), True
        if not is_told:
            progress.warn("another build of this launch is under way; waiting for its result")
            is_told = True
        time.sleep(_WAIT_SECONDS)


def _build(request: CaptureRequest, store: Store, progress: Progress, key: str) -> CaptureRow:
    started = time.monotonic()
    unproven = unproven_key(request.launch, weights_stamp(request.found.model)).hex
    shared = _shared(request, store, progress)
    with _log(store, key) as log:
        context = _context(request, store, log, progress)
        cold, proved = _cold(request, context, store, unproven, shared)
        if proved is None:
            try:
                proved = _proof(context, cold)
            except CaptureError:
                store.actions.discard(unproven)  # The next build starts anew, whatever went wrong.
                raise
    row = _record(request, store, key, cold, proved, time.monotonic() - started)
    store.actions.discard(unproven)
    return row


def build_shard(
    request: CaptureRequest, number: int, num: int, store: Store, progress: Progress
) -> UnprovenRow:
    """Runs shard `number`, from 1 to `num`, and returns its record. Seals nothing and ignores `request.out`.

    Raises like `build_capture`.
    """
    shard = shards_of(request.found, request.launch, request.given, num)[number - 1]

    def run() -> UnprovenRow:
        store.require_writable()
        with _log(store, shard.key) as log:
            context = replace(_context(request, store, log, progress), asks=False)
            row, _ = _started(replace(request, given=shard.files), context, f"shard {shard.name}")
        record_unproven(store, shard.key, row)
        return row

    progress.begin(f"shard {shard.name}")
    with store.in_use():
        row, is_new = _once(store, shard.key, find_unproven, run, progress)
    progress.end(f"ready in {row.cold_seconds:.0f} s; {_size(row)}{'' if is_new else ' (done before)'}")
    return row


def _shared(request: CaptureRequest, store: Store, progress: Progress) -> tuple[CapturedFile, ...]:
    """Returns the files that the shards of `request` left and those that the launch needs. Runs shards that have no record.

    Returns nothing if there are no shards.
    """
    sharding = request.sharding
    if sharding is None:
        return ()
    shards = shards_of(request.found, request.launch, request.given, sharding.num)
    missing = [shard for shard in shards if find_unproven(store, shard.key) is None]
    if sharding.runs:
        build_shards(request, missing, store, progress)
    progress.begin(counted(sharding.num, "shard"))
    rows = {shard.name: find_unproven(store, shard.key) for shard in shards}
    lacking = ", ".join(name for name, row in rows.items() if row is None)
    if lacking:
        raise CaptureError(
            f"the store has no record of the shards {lacking} (build capture --shard I/N runs one)"
        )
    made = union((row for row in rows.values() if row is not None), request.given)
    progress.end(f"{len(missing)} run; {len(made)} files")
    kind_of = request.found.adapter.kind_of
    given = [
        CapturedFile(path=path, digest=store.objects.put_bytes(text.encode()), kind=kind_of(path))
        for path, text in request.given.items()
    ]
    return tuple(sorted((*made, *given), key=lambda file: file.path))


def build_shards(request: CaptureRequest, shards: Sequence[Shard], store: Store, progress: Progress) -> None:
    """Runs `shards` one after another, since they have one root.

    Raises like `build_shard`, but CaptureError only after all have run, with what each one that failed said.
    """
    failed: list[str] = []
    for shard in shards:
        try:
            build_shard(request, shard.number, shard.num, store, progress)
        except CaptureError as error:
            failed.append(f"  shard {shard.name}: {error}")
    if failed:
        others = "; the others are recorded, and are not run again" if len(failed) < len(shards) else ""
        raise CaptureError("\n".join([f"{counted(len(failed), 'shard')} failed{others}:", *failed]))


def _context(request: CaptureRequest, store: Store, log: IO[Any], progress: Progress) -> BuildContext:
    secrets = _secrets(request)
    require_public(request.launch.dumps(), "launch", secrets)
    for secret in secrets:
        if not secret.is_searched:
            progress.warn(
                f"{secret.name} has fewer than {MIN_SECRET_BYTES} bytes, so no file is searched for it"
            )
    adapter, place = request.found.adapter, request.launch.place
    return BuildContext(
        request.found,
        request.launch,
        store.objects,
        log,
        request.ready_seconds,
        progress,
        Rules(
            left_out=adapter.left_out,
            kind_of=adapter.kind_of,
            secrets=secrets,
            places={"root": place.root, "site_packages": place.site_packages, "prefix": place.prefix},
        ),
    )


def _secrets(request: CaptureRequest) -> tuple[Secret, ...]:
    return secrets_of(request.found.environ, request.found.words, request.launch.words)


def _cold(
    request: CaptureRequest,
    context: BuildContext,
    store: Store,
    key: str,
    shared: tuple[CapturedFile, ...],
) -> tuple[UnprovenRow, Proved | None]:
    """Returns the record of a cold run: of one that runs now, or of an earlier build that was stopped in its proof.

    The run begins with the files that shards left. If it needs nothing else, it is also the proof.
    """
    progress = context.progress
    progress.begin("1 cold")
    row = find_unproven(store, key)
    if row is not None:
        progress.end(f"done before, by a build that was stopped in its proof: {len(row.files)} files")
        return row, None
    row, ran = _started(request, context, f"cold run of {_label(request.launch)}", shared)
    proved = proved_by(context, shared, ran, row) if shared else None
    if proved is None:
        record_unproven(store, key, row)
    alone = "" if proved is None else "; the shards' files are all that it takes, so this is the proof"
    told = f"ready in {ran.ready_seconds:.0f} s, {len(ran.answers)} requests; {describe_counts(ran.counts)}"
    progress.end(f"{told}; {_size(row)}{alone}")
    return row, proved


def _started(
    request: CaptureRequest, context: BuildContext, label: str, files: tuple[CapturedFile, ...] = ()
) -> tuple[UnprovenRow, RunResult]:
    """Starts the server with `files` in its caches, or if there are none with what the launch needs. Refuses nothing.

    Returns what the server left and what it did.
    """
    try:
        with build_run(context, files, given=request.given) as (ran, sandbox):
            _require_agents(ran, context)
            found = collect(sandbox.root, context.rules, context.objects)
    except EndedEarlyError as early:
        raise CaptureError(early.cause) from early
    for path in found.strays[:3]:
        context.progress.warn(f"{path} was written to the server's home, which is not captured")
    if not found.files:
        raise CaptureError("the server left nothing in its caches: there is nothing to capture")
    row = UnprovenRow(
        label=label,
        files=found.files,
        left_out=found.left_out,
        answers=tuple(answer.whole for answer in ran.answers),
        saved=ran.counters("_saved"),
        cold_seconds=ran.ready_seconds,
        cold_counts={**ran.counts, "files": len(found.files)},
        places=dict(found.places),
    )
    return row, ran


def _require_agents(ran: RunResult, context: BuildContext) -> None:
    """Raises CaptureError if there was no agent, or not every hook. Otherwise the proof would fail, one start later."""
    processes = ran.seen.processes.values()
    if not processes:
        raise CaptureError(
            "no process of the server has an agent: its Python ignored PYTHONPATH"
            " (start it without -E, -I or -S, and leave PYTHONPATH alone)"
        )
    adapter = context.found.adapter
    roles = adapter.roles(context.launch)
    for process in processes:
        for hook in adapter.hooks if process.role in roles else ():
            if process.hooks.get(hook, False) is False:
                raise CaptureError(
                    f"{process.title}: {hook} cannot be watched: this version of {adapter.name} lacks what"
                    " the agent hooks, so nothing could be proved"
                )


def _proof(context: BuildContext, cold: UnprovenRow) -> Proved:
    context.progress.begin("2 proof")
    proved = prove(context, cold)
    counts = proved.receipt.proof.counts
    saved = sum(cold.artifacts.values()) or counts["loads"]
    added = len(proved.receipt.files) - len(cold.files)
    more = f"; {added} files more than the first start left" if added else ""
    context.progress.end(
        f"ready in {proved.ready_seconds:.0f} s, {counts['requests']} requests; {describe_counts({})},"
        f" 0 new files, {counts['loads']} of {saved} artifacts loaded{more}"
    )
    return proved


def _record(
    request: CaptureRequest, store: Store, key: str, cold: UnprovenRow, proved: Proved, build_seconds: float
) -> CaptureRow:
    launch = request.launch
    receipt = proved.receipt.model_copy(update={"live_graphs": request.live_graphs})
    require_public(receipt.dumps(), "receipt", _secrets(request))
    row = CaptureRow(
        label=f"capture of {_label(launch)}",
        launch=store.objects.put_bytes(launch.dumps()),
        receipt=store.objects.put_bytes(receipt.dumps()),
        objects=tuple(sorted({file.digest for file in receipt.files}, key=str)),
        cold_seconds=cold.cold_seconds,
        warm_seconds=proved.ready_seconds,
        build_seconds=build_seconds,
        cold_counts=cold.cold_counts,
        places=cold.places,
    )
    return record_capture(store, key, row)


def _seal(request: CaptureRequest, store: Store, row: CaptureRow) -> Bundle:
    """Seals a recorded capture. If the model lies in another directory here, the launch of `request` names it."""
    launch, receipt = read_documents(store, row)
    if launch.model.name != request.launch.model.name:
        launch = request.launch
    pack_bundle(launch.dumps(), launch.id, receipt, store.objects, request.out, request.signing)
    return open_bundle(request.out)


def _label(launch: Launch) -> str:
    return f"{launch.guest} {launch.model.name} ({launch.id:.12})"


def _size(row: UnprovenRow) -> str:
    num_bytes = sum(file.digest.size_bytes for file in row.files)
    return f"{len(row.files)} files, {num_bytes / 1e6:.1f} MB"


@contextmanager
def _log(store: Store, key: str) -> Iterator[IO[Any]]:
    """Opens the log for the server's output, in the store. The log may hold anything, so no bundle contains it."""
    path = store.root / "logs" / f"capture-{key[:16]}.log"
    with ExitStack() as stack:
        try:
            make_directories(path.parent)
            file = stack.enter_context(open(path, "wb", opener=partial(os.open, mode=0o600)))
        except OSError as error:
            raise store_error("write", path, error) from error
        yield file
