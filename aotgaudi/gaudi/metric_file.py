"""What ``PT_HPU_METRICS_FILE`` says after a process has ended: for whoever was not inside it, as a wrapper is not.

The bridge writes one file a process: ``-rank<R>`` goes before the extension where RANK is set, ``.<N>`` after the name
where that exists already. Each is a JSON list of records ``{"metric_name", "triggered_by", "generated_on",
"statistics"}``; the last record of a metric has the totals. A process that was killed leaves an unfinished file.
Source: ``saver.py`` of the bridge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotgaudi.errors import StoreError, store_error
from aotgaudi.gaudi.counters import COMPILATIONS, FALLBACKS, RECIPES, Counts, counts_of

MAX_FILE_BYTES = 64 << 20


def metric_files(configured: Path) -> tuple[Path, ...]:
    """Returns the files that processes told to write to `configured` have written, in order of their names."""
    pattern = re.compile(
        rf"{re.escape(configured.stem)}(-rank[0-9]+)?{re.escape(configured.suffix)}(\.[0-9]+)?"
    )
    try:
        names = sorted(path for path in configured.parent.iterdir() if pattern.fullmatch(path.name))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise store_error("list", configured.parent, error) from error
    return tuple(path for path in names if path.is_file())


def read_metric_file(path: Path) -> Counts:
    """Returns the totals of the process that wrote `path`.

    Raises:
        StoreError: the file cannot be read, is unfinished or is something else. Without it nothing is known of the
            process, which is not the same as nothing having been compiled.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise StoreError(f"{path}: has more than {MAX_FILE_BYTES} bytes, which no metrics file has")
        records = json.loads(path.read_bytes())
        last = {record["metric_name"]: _statistics(record["statistics"]) for record in records}
        if COMPILATIONS not in last:
            raise StoreError(f"{path}: has no record of {COMPILATIONS!r}")
        return counts_of(last[COMPILATIONS], last.get(RECIPES, {}), last.get(FALLBACKS, {}))
    except OSError as error:
        raise store_error("read", path, error) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(f"{path}: is not a metrics file, or unfinished: {error}") from error


def _statistics(value: Any) -> Mapping[str, Any]:
    """An object, or a list of pairs, which some versions write."""
    return dict(value) if isinstance(value, list) else dict(value.items())
