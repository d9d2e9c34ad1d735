"""What verifying a bundle found, in terms of entries, and how that reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aotgaudi.errors import CorruptError, NotWarmError

_MAX_ROWS = 10


@dataclass(frozen=True, slots=True)
class MissingEntry:
    """An entry (its label) that cannot run because something was never built, or has been removed."""

    entry: str
    reason: str


@dataclass(frozen=True, slots=True)
class CorruptObject:
    """An object that is not what its digest says, and the labels of the entries that need it."""

    path: str
    reason: str
    entries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What verifying found. `extra` are paths under ``objects/`` that the index does not list."""

    num_entries: int
    num_objects: int
    object_bytes: int
    missing: tuple[MissingEntry, ...]
    corrupt: tuple[CorruptObject, ...]
    extra: tuple[str, ...]

    @property
    def is_intact(self) -> bool:
        """Whether every entry can run, and nothing else is there."""
        return not (self.missing or self.corrupt or self.extra)

    def raise_if_bad(self, bundle_path: Path) -> None:
        """Raises CorruptError when bytes differ or are unaccounted for, else NotWarmError when entries miss.

        The message is a plain table of the first rows (entry, state, reason) and the command that mends it.
        """
        if self.is_intact:
            return
        counts = (f"{len(self.corrupt)} corrupt", f"{len(self.missing)} missing", f"{len(self.extra)} extra")
        rows = self._rows()
        message = "\n".join(
            [
                f"bundle {bundle_path} cannot be served: {', '.join(counts)} ({self.num_entries} entries)",
                *_table([("entry", "state", "reason"), *rows[:_MAX_ROWS]]),
                *([f"... and {len(rows) - _MAX_ROWS} more"] if len(rows) > _MAX_ROWS else []),
                mending_command(bundle_path),
            ]
        )
        raise CorruptError(message) if self.corrupt or self.extra else NotWarmError(message)

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            *((_abridged(bad.entries), "corrupt", f"{bad.path}: {bad.reason}") for bad in self.corrupt),
            *(("-", "extra", f"{path}: not in the index") for path in self.extra),
            *((gone.entry, "missing", gone.reason) for gone in self.missing),
        ]


def mending_command(bundle_path: Path) -> str:
    """Returns the sentence that says how to make a whole bundle again."""
    return (
        "mend it with: aotgaudi build SPEC, or:"
        f" aotgaudi build cache MANIFEST && aotgaudi build bundle MANIFEST -o {bundle_path}"
    )


def _abridged(labels: tuple[str, ...]) -> str:
    if not labels:
        return "-"
    return labels[0] + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{entry:{widths[0]}}  {state:{widths[1]}}  {reason}" for entry, state, reason in rows]
