"""Traces from files.

A file may be any of these, compressed with gzip or not. What it is, its first line says.

==========  =========================================================================================
CSV         a header, then a request a line: the public Azure and BurstGPT traces as they are
JSONL       an object a line
our log     of ``serve --log-format json --access-log``: the lines of requests that were generated for
Prometheus  the text of ``/metrics``: only histograms, so a trace is drawn (traffic/histograms.py)
==========  =========================================================================================

A column, or a key, may have any of the names in `_NAMES`; case, blanks, dashes and underscores do not count, and others are
ignored. Times are seconds, or dates with a time as ISO 8601 writes them, to the nanosecond.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aotgaudi.errors import SpecError
from aotgaudi.files import open_regular
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.traffic.exposition import is_exposition
from aotgaudi.traffic.histograms import drawn_trace
from aotgaudi.traffic.trace import MAX_REQUESTS, Drawing, Trace

_MAX_LINE_CHARS = 1 << 20
_MAX_SHOWN_CHARS = 40
_GZIP_MAGIC = b"\x1f\x8b"
_WANTED = "a CSV with a header, a JSON object a line, or the text of /metrics"

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "time": (
            "timestamp",
            "time",
            "arrival",
            "arrivaltime",
            "arrivalseconds",
            "arrivedat",
            "seconds",
            "ts",
        ),
        "prompt tokens": ("contexttokens", "prompttokens", "inputtokens", "requesttokens", "numprompttokens"),
        "generated tokens": (
            *("generatedtokens", "generationtokens", "completiontokens", "outputtokens"),
            *("responsetokens", "numgeneratedtokens", "numoutputtokens"),
        ),
    }
)
_PLAIN = ("time", "prompt_tokens", "generated_tokens")
_NANOSECONDS = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s*(Z|[+-]\d\d:?\d\d)?", re.ASCII
)


def read_trace(path: Path, drawing: Drawing | None = None) -> Trace:
    """Returns the trace in a file; of a file of histograms, one that is drawn: the same each time.

    Raises:
        SpecError: one mistake, with the file, the line, and what would be right. Also where histograms lack `drawing`.
    """
    with _opened(path) as lines:
        first = next((line for line in lines if line.text.strip()), None)
        if first is None:
            raise SpecError(str(path), "is empty", _WANTED)
        rest = itertools.chain([first], lines)
        if first.text.lstrip().startswith("{"):
            is_log = _logged(first.text) is not None
            return _collected(path, iter(_from_log(path, rest)) if is_log else _from_json(path, rest))
        if is_exposition(first.text):
            return drawn_trace(path, "\n".join(line.text for line in rest), drawing)
        return _collected(path, _from_csv(path, rest))


# Lines


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[_Line]]:
    """Gives the lines of a file, their ends left out; as they are read, never the whole file."""
    try:
        with open_regular(path) as raw:
            is_zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if is_zipped else io.BufferedReader(raw) as file:
                yield _lines(path, file)
    except FileNotFoundError as error:
        raise SpecError(str(path), "is not there", "a trace") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SpecError(str(path), f"cannot be unpacked: {error}", "a whole gzip file") from error
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"is not UTF-8 text: {error.reason}", _WANTED) from error
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror or error}", "a trace") from error


def _lines(path: Path, file: io.BufferedIOBase) -> Iterator[_Line]:
    for number in itertools.count(1):
        line = file.readline(_MAX_LINE_CHARS)
        if not line:
            return
        if len(line) == _MAX_LINE_CHARS:
            raise SpecError(f"{path}, line {number}", "is too long", f"at most {_MAX_LINE_CHARS:,} bytes")
        yield _Line(number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))


# Rows


@dataclass(frozen=True, slots=True)
class _Row:
    """`values`: time, prompt tokens, generated tokens, as they were written."""

    number: int
    values: tuple[Any, Any, Any]


def _from_csv(path: Path, lines: Iterable[_Line]) -> Iterator[_Row]:
    rows = csv.reader(line.text for line in lines)  # A row a line: quoted line ends are no use in numbers.
    header = next(rows)
    places = _places(f"{path}, line 1", header, "columns")
    try:
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                columns = f"has {len(row)} of {len(header)} columns"
                raise SpecError(
                    f"{path}, line {rows.line_num}", columns, f"as the header: {', '.join(header)}"
                )
            yield _Row(rows.line_num, (row[places[0]], row[places[1]], row[places[2]]))
    except csv.Error as error:
        raise SpecError(f"{path}, line {rows.line_num}", f"is not CSV: {error}") from error


def _from_json(path: Path, lines: Iterable[_Line]) -> Iterator[_Row]:
    for line in lines:
        if not line.text.strip():
            continue
        where = f"{path}, line {line.number}"
        try:
            value = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            raise SpecError(where, f"is not JSON: {error}", "an object a line") from error
        if not isinstance(value, dict):
            raise SpecError(where, "is no JSON object", "an object a line")
        items = list(value.items())
        places = _places(where, [name for name, _ in items], "keys")
        yield _Row(line.number, (items[places[0]][1], items[places[1]][1], items[places[2]][1]))


def _from_log(path: Path, lines: Iterable[_Line]) -> list[_Row]:
    """The requests of a server's log, in the order of their arrival: a line is written when one has ended."""
    rows = []
    for line in lines:
        fields = _logged(line.text) or {}
        if fields.get("generated_tokens") is not None:
            values = fields.get("arrived"), fields.get("prompt_tokens"), fields["generated_tokens"]
            rows.append(_Row(line.number, values))
        if len(rows) > MAX_REQUESTS:
            raise SpecError(
                f"{path}, line {line.number}", f"is request {len(rows):,}", f"at most {MAX_REQUESTS:,}"
            )
    return sorted(rows, key=lambda row: _date(row.values[0]) or 0)


def _logged(text: str) -> dict[str, Any] | None:
    """The fields of a line of our log in JSON; None where it is none: what other programs wrote in between."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return (
        value if isinstance(value, dict) and {"time", "level", "logger", "message"} <= value.keys() else None
    )


def _places(where: str, given: Sequence[str], noun: str) -> tuple[int, int, int]:
    """Returns where the time, the prompt tokens and the generated tokens are among `given` names."""
    plain = [re.sub(r"[\s_-]", "", name).lower() for name in given]
    found = {
        wanted: [index for index, name in enumerate(plain) if name in names]
        for wanted, names in _NAMES.items()
    }
    for wanted, indices in found.items():
        if len(indices) != 1:
            count = "no" if not indices else "more than one"
            shown = ", ".join(_shown(name) for name in given[:8])
            raise SpecError(
                where, f"has {count} {wanted} among its {noun} {shown}", f"such as {', '.join(_PLAIN)}"
            )
    time, prompt, generated = (indices[0] for indices in found.values())
    return time, prompt, generated


# Values


def _collected(path: Path, rows: Iterator[_Row]) -> Trace:
    moments: list[float] = []
    prompts: list[int] = []
    generated: list[int] = []
    read, units = _number, 1
    for row in rows:
        where = f"{path}, line {row.number}"
        if len(moments) == MAX_REQUESTS:
            raise SpecError(
                where, f"is request {MAX_REQUESTS + 1:,}", f"at most {MAX_REQUESTS:,}: a part of it"
            )
        if not moments and _number(row.values[0]) is None:
            read, units = _date, _NANOSECONDS
        moment = read(row.values[0])
        if moment is None:
            wanted = "as in the lines before" if moments else "seconds, or a date with a time"
            raise SpecError(where, f"has the time {_shown(row.values[0])}", wanted)
        if moments and moment < moments[-1]:
            raise SpecError(where, "has a time before that of the request before it", "sort it by time")
        moments.append(moment)
        prompts.append(_count(where, row.values[1], "prompt tokens", 1))
        generated.append(_count(where, row.values[2], "generated tokens", 0))
    if not moments:
        raise SpecError(str(path), "has no requests", "a request a line")
    return Trace(tuple((one - moments[0]) / units for one in moments), tuple(prompts), tuple(generated))


def _number(value: Any) -> float | None:
    """The number that was written; None where it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _date(value: Any) -> int | None:
    """Nanoseconds of a date with a time: one without an offset counts as UTC, since only differences do."""
    match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    *fields, fraction, offset = match.groups()
    try:
        moment = datetime(*map(int, fields), tzinfo=timezone.utc)  # type: ignore[arg-type, misc]
    except ValueError:
        return None
    seconds = (moment - _EPOCH) // timedelta(seconds=1) - _offset_seconds(offset)
    return seconds * _NANOSECONDS + int((fraction or "").ljust(9, "0"))


def _offset_seconds(offset: str | None) -> int:
    if offset in (None, "Z"):
        return 0
    assert offset is not None
    seconds = int(offset[1:3]) * 3600 + int(offset[-2:]) * 60
    return seconds if offset[0] == "+" else -seconds


def _count(where: str, value: Any, name: str, least: int) -> int:
    number = _number(value)
    if number is None or not number.is_integer() or not least <= number <= LARGEST_LIMIT:
        raise SpecError(
            where, f"has {_shown(value)} {name}", f"a whole number from {least} to {LARGEST_LIMIT:,}"
        )
    return int(number)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
    return repr(text) if isinstance(value, str) else text
