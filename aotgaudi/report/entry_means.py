"""What the entries that are built took and take, on average of a kind: by which a budget for others is divided."""

from __future__ import annotations

from dataclasses import dataclass

from aotgaudi.report.holdings import Holdings


@dataclass(frozen=True, slots=True)
class EntryMean:
    """One entry of a kind: the bytes of its compiled units, and what compiling them took.

    A unit that several entries of the kind share counts once, and so each for its part. `compile_seconds` is None where
    the record of a unit is not known; tracing is not in it, which no record has.
    """

    num_entries: int
    size_bytes: float
    compile_seconds: float | None


def entry_mean(held: Holdings, kind: str) -> EntryMean | None:
    """Returns the mean over the built entries of a kind; None where none is built."""
    programs = [program for program in held.programs if any(entry.kind == kind for entry in program.entries)]
    num_entries = sum(entry.kind == kind for program in programs for entry in program.entries)
    if not num_entries:
        return None
    keys = sorted({key for program in programs for key in program.units})
    size = sum(digest.size_bytes for key in keys for digest in held.units[key].artifact.values())
    is_timed = all(key in held.records for key in keys)
    seconds = sum(held.records[key].compile_seconds for key in keys) if is_timed else None
    return EntryMean(num_entries, size / num_entries, None if seconds is None else seconds / num_entries)
