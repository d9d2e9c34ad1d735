"""Shards of a capture's cold run: several servers, each warming up a slice of the shapes.

A server gets the files of its slice instead of those of all shapes, and no requests. The files that it leaves are recorded
in the store. A shard that died is therefore run again alone, a shard with a record is not run again, and containers that
share a store run shards at the same time (``--shard I/N``, then ``--merge``). The capture's cold run begins with the files
of all shards. It warms up all shapes, gets all requests, and compiles what no shard compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.bundle.launch import Launch
from aotgaudi.errors import SpecError
from aotgaudi.wrap.capture_records import UnprovenRow, shard_key
from aotgaudi.wrap.launch import Found

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
        runs: Whether shards without a record in the store are run.
    """

    num: int
    runs: bool


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
