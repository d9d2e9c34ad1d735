"""The index: look-ups that found everything, each remembered in a small JSON file.

A row says which files answered a look-up, so that the next equal one only checks that they are still there and reads no
record (`Store.remembers`). ``index/<name>.json`` is::

    {"name": name, "sha256": of the value's JSON with sorted keys, "value": value}

The index is a cache. Rows are made from records, so losing one only costs reading the records again: a file that is wrong in
any way is a miss, and the next look-up replaces it. A wrong row could leave something unbuilt, so each has its name and a
checksum. Whoever may write to the index may write to the store, and decides anyway what it holds. Sealing and serving never
read it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import AotGaudiError
from aotgaudi.files import make_directories, read_regular, write_atomic

MOST_ROWS = 16
"""How many look-ups are kept, those written last: one for each manifest that is being worked on, and some more."""

MOST_ROW_BYTES = 64 << 20
"""The largest row: a look-up of some 300,000 records. A longer one is not remembered."""

_LOG = logging.getLogger(__name__)


class Index:
    """The rows in the directory `root`, by name. Safe in threads and between processes.

    No method raises: a row that cannot be read is a miss, and one that cannot be written is a warning.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def get(self, name: str) -> dict[str, Any] | None:
        """Returns the row `name`; None if there is none, or it cannot be used."""
        try:
            data = read_regular(self._path(name), MOST_ROW_BYTES)
            match json.loads(data):
                case {"name": str(found), "sha256": digest, "value": dict(value)} if found == name:
                    return value if digest == sha256_bytes(_dumps(value)) else None
        except (OSError, AotGaudiError, ValueError, RecursionError):
            pass
        return None

    def put(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes the row `name`, in place of an earlier one, and drops the oldest beyond `MOST_ROWS`."""
        data = _dumps({"name": name, "sha256": sha256_bytes(_dumps(value)), "value": dict(value)})
        if len(data) > MOST_ROW_BYTES:
            return
        try:
            make_directories(self.root)
            write_atomic(self._path(name), data)
        except (OSError, AotGaudiError) as error:
            _LOG.warning("a look-up is not remembered: %s", error)
            return
        others = [path for path in self._rows() if path.stem != name]
        for path in others[MOST_ROWS - 1 :]:
            with contextlib.suppress(OSError):
                path.unlink()

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows())

    def _path(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def _rows(self) -> list[Path]:
        """The rows' files, the one written last first."""
        rows = []
        for path in self.root.glob("[!.]*.json"):
            with contextlib.suppress(OSError):
                rows.append((os.lstat(path).st_mtime_ns, path))
        return [path for _, path in sorted(rows, reverse=True)]


def _dumps(value: Mapping[str, Any]) -> bytes:
    """JSON, which unlike the canonical one takes an inode of 64 bits."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
