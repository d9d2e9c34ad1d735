"""Shards of a capture's cold run: several servers, each warming up a slice of the shapes.

A server gets the files of its slice instead of those of all shapes, its own port, and no requests. The files that it leaves
are recorded in the store. A shard that died is therefore run again alone, a shard with a record is not run again, and
containers that share a store run shards at the same time (``--shard I/N``, then ``--merge``). The capture's cold run begins
with the files of all shards. It warms up all shapes, gets all requests, and compiles what no shard compiled.

Each shard is a process of ours, because servers are watched, signalled and reaped by process.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.bundle.launch import Launch
from aotgaudi.errors import CaptureError, SpecError, counted, store_error
from aotgaudi.files import make_directories
from aotgaudi.wrap.build_run import Progress
from aotgaudi.wrap.capture_records import UnprovenRow, shard_key
from aotgaudi.wrap.launch import Found
from aotgaudi.wrap.output import last_line, tail_of
from aotgaudi.wrap.session import Plan

MAX_SHARDS = 1024
"""Limits the damage of a typing error."""


@dataclass(frozen=True)
class Shard:
    """One of `num` shards, counted from 1: the files that its server gets, and the key of its record."""

    number: int
    num: int
    files: Mapping[str, str]
    key: str

    @property
    def name(self) -> str:
        """``2/3``."""
        return f"{self.number}/{self.num}"


@dataclass(frozen=True)
class Sharding:
    """How a cold run is shared.

    Attributes:
        num: How many shards there are.
        command: Returns the command that runs the shard of a name, ``2/3``; None: all records must be in the store.
        environ: The environment of these commands.
    """

    num: int
    command: Callable[[str], Sequence[str]] | None
    environ: Mapping[str, str] = field(default_factory=dict)


def parse_shard(text: str) -> tuple[int, int]:
    """Returns I and N of ``I/N``. Raises SpecError."""
    number, _, num = text.partition("/")
    if number.isdecimal() and num.isdecimal() and 1 <= int(number) <= int(num) <= MAX_SHARDS:
        return int(number), int(num)
    raise SpecError("--shard", f"is {text!r}", f"I/N, such as 1/4, with N up to {MAX_SHARDS}")


def shards_of(found: Found, launch: Launch, files: Mapping[str, str], num: int) -> tuple[Shard, ...]:
    """Returns the shards of a launch with `files` for its shapes. Raises SpecError if they cannot be cut into `num`."""
    slices = found.adapter.slices(files, num)
    return tuple(
        Shard(number, num, given, shard_key(launch, given).hex) for number, given in enumerate(slices, 1)
    )


def placed_beside_others(plan: Plan) -> Plan:
    """Returns `plan` with a port that is free now, unless the server listens on a socket below its root."""
    if plan.address.uds is not None:
        return plan
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    return replace(plan, words=(*plan.words, "--port", str(port)), address=replace(plan.address, port=port))


def run_shards(
    shards: Sequence[Shard],
    command: Callable[[str], Sequence[str]],
    environ: Mapping[str, str],
    logs: Path,
    progress: Progress,
) -> None:
    """Runs `shards` one after another, since they have one root. Returns when all have succeeded.

    Raises:
        CaptureError: Shards failed. The others ran to their end, and their records stay. Names each failed shard with its
        log. StoreError: A log cannot be written.
    """
    failed: list[str] = []
    for number, shard in enumerate(shards):
        progress.note(f"{number} of {counted(len(shards), 'shard')} ended")
        log = _log_path(logs, shard)
        status = _run(command(shard.name), environ, log)
        if status != 0:
            said = last_line(tail_of(log)) or "it said nothing"
            failed.append(f"  shard {shard.name}: exit code {status}: {said} (all of it: {log})")
    if failed:
        others = "; the others are recorded, and are not run again" if len(failed) < len(shards) else ""
        raise CaptureError("\n".join([f"{counted(len(failed), 'shard')} failed{others}:", *failed]))


def _run(words: Sequence[str], environ: Mapping[str, str], log: Path) -> int:
    try:
        make_directories(log.parent)
        with log.open("wb") as file:
            process = subprocess.Popen(
                words, env=dict(environ), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
    except OSError as error:
        raise store_error("start a shard with the log", log, error) from error
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _log_path(logs: Path, shard: Shard) -> Path:
    return logs / f"shard-{shard.number}-of-{shard.num}-{shard.key[:16]}.log"


def union(rows: Iterable[UnprovenRow], given: Iterable[str]) -> tuple[CapturedFile, ...]:
    """Returns by path the files of all rows, except those at the paths `given`.

    Several shards may have made the same graph with different bytes (K-13). So files that belong together by name, such as a
    recipe and its metadata, come from one row: the first that has any of them.
    """
    left_out, owners = frozenset(given), dict[str, int]()
    files: dict[str, CapturedFile] = {}
    for number, row in enumerate(rows):
        for file in row.files:
            stem = str(PurePosixPath(file.path).with_suffix(""))
            if file.path not in left_out and owners.setdefault(stem, number) == number:
                files[file.path] = file
    return tuple(files[path] for path in sorted(files))
