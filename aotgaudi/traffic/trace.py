"""Reads traces: when requests came, and how many tokens their prompts and answers had.

A trace is a CSV with a header, such as the public Azure and BurstGPT traces, or has a JSON object a line. It may be gzipped.
Columns and keys may have any of the names in `_NAMES`. Case, blanks, dashes and underscores do not matter, and other columns
are ignored. Times are seconds, or ISO 8601 dates with a time, to the nanosecond, in order.
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
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aotgaudi.errors import SpecError, shortened
from aotgaudi.files import open_regular
from aotgaudi.spec.limits import LARGEST_LIMIT

MAX_REQUESTS = 2_000_000
"""The most requests of a trace, which take some minutes of replay and 200 MB."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. All attributes have one item per request, and there is at least one.

    Attributes:
        arrivals: Seconds since the first arrival, ascending.
        prompt_tokens: Tokens of each prompt, at least 1.
        generated_tokens: Tokens of each answer; 0 without an answer.
    """

    arrivals: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]

    def faster(self, factor: float) -> Trace:
        """Returns the same requests with arrivals `factor` times as fast. Raises SpecError if a time is not finite then."""
        arrivals = tuple(arrival / factor for arrival in self.arrivals)
        if not math.isfinite(arrivals[-1]):
            raise SpecError("trace", "has a time that is not finite", "seconds")
        return Trace(arrivals, self.prompt_tokens, self.generated_tokens)


_MAX_LINE_CHARS = 1 << 20
_MAX_SHOWN_CHARS = 40
_GZIP_MAGIC = b"\x1f\x8b"
_WANTED = "a CSV with a header, or a JSON object a line"

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "time": (
            *("timestamp", "time", "ts", "seconds"),
            *("arrival", "arrivaltime", "arrivalseconds", "arrivedat"),
        ),
        "prompt tokens": ("contexttokens", "prompttokens", "inputtokens", "requesttokens", "numprompttokens"),
        "generated tokens": (
            *("generatedtokens", "generationtokens", "completiontokens", "outputtokens"),
            *("responsetokens", "numgeneratedtokens", "numoutputtokens"),
        ),
    }
)
_PLAIN = "such as time, prompt_tokens, generated_tokens"
_NANOSECONDS = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s*(Z|[+-]\d\d:?\d\d)?", re.ASCII
)

_Row = tuple[int, tuple[Any, ...]]
"""The number of a line, and its time, prompt tokens and generated tokens as written."""


def read_trace(path: Path) -> Trace:
    """Returns the trace in a file. Raises SpecError for a mistake, which names file, line and remedy."""
    lines = _lines(path)
    first = next((line for line in lines if line[1].strip()), None)
    if first is None:
        raise SpecError(str(path), "is empty", _WANTED)
    rows = _json_rows if first[1].lstrip().startswith("{") else _csv_rows
    return _collected(path, rows(path, itertools.chain([first], lines)))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the numbered lines of a file without line ends, one by one, without holding the whole file in memory."""
    try:
        with open_regular(path) as raw:
            is_zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if is_zipped else io.BufferedReader(raw)
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE_CHARS)
                if not line:
                    return
                if len(line) == _MAX_LINE_CHARS:
                    raise SpecError(
                        f"{path}, line {number}", "is too long", f"at most {_MAX_LINE_CHARS:,} bytes"
                    )
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except FileNotFoundError as error:
        raise SpecError(str(path), "is not there", "a trace") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SpecError(str(path), f"cannot be unpacked: {error}", "a whole gzip file") from error
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"is not UTF-8 text: {error.reason}", _WANTED) from error
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror or error}", "a trace") from error


# Rows


def _csv_rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    lines = iter(lines)
    first = next(lines)
    skipped = first[0] - 1
    rows = csv.reader(text for _, text in itertools.chain([first], lines))
    header = next(rows)  # One row per line: numbers need no quoted line ends.
    places = _places(f"{path}, line {first[0]}", header, "columns")
    try:
        for row in rows:
            number = skipped + rows.line_num
            if len(row) not in (0, len(header)):
                columns = f"has {len(row)} of {len(header)} columns"
                raise SpecError(f"{path}, line {number}", columns, f"as the header: {', '.join(header)}")
            if row:
                yield number, tuple(row[place] for place in places)
    except csv.Error as error:
        raise SpecError(f"{path}, line {skipped + rows.line_num}", f"is not CSV: {error}") from error


def _json_rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[_Row]:
    for number, text in lines:
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(where, f"is not JSON: {error}", "an object a line") from error
        if not isinstance(value, dict):
            raise SpecError(where, "is no JSON object", "an object a line")
        values = tuple(value.values())
        yield number, tuple(values[place] for place in _places(where, list(value), "keys"))


def _places(where: str, given: Sequence[str], noun: str) -> list[int]:
    """Returns the places of time, prompt tokens and generated tokens among the `given` names."""
    plain = [re.sub(r"[\s_-]", "", name).lower() for name in given]
    places = []
    for wanted, names in _NAMES.items():
        found = [index for index, name in enumerate(plain) if name in names]
        if len(found) != 1:
            count = "no" if not found else "more than one"
            shown = ", ".join(_shown(name) for name in given[:8])
            raise SpecError(where, f"has {count} {wanted} among its {noun} {shown}", _PLAIN)
        places += found
    return places


# Values


def _collected(path: Path, rows: Iterable[_Row]) -> Trace:
    moments: list[float] = []
    prompts: list[int] = []
    generated: list[int] = []
    read, units = _number, 1
    for number, (time, prompt, answer) in rows:
        where = f"{path}, line {number}"
        if len(moments) == MAX_REQUESTS:
            raise SpecError(
                where, f"is request {MAX_REQUESTS + 1:,}", f"at most {MAX_REQUESTS:,}: a part of it"
            )
        if not moments and _number(time) is None:
            read, units = _date, _NANOSECONDS
        moment = read(time)
        if moment is None:
            wanted = "as in the lines before" if moments else "seconds, or a date with a time"
            raise SpecError(where, f"has the time {_shown(time)}", wanted)
        if moments and moment < moments[-1]:
            raise SpecError(where, "has a time before that of the request before it", "sort it by time")
        moments.append(moment)
        prompts.append(_count(where, prompt, "prompt tokens", 1))
        generated.append(_count(where, answer, "generated tokens", 0))
    if not moments:
        raise SpecError(str(path), "has no requests", "a request a line")
    return Trace(tuple((one - moments[0]) / units for one in moments), tuple(prompts), tuple(generated))


def _number(value: Any) -> float | None:
    """Returns `value` as a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _date(value: Any) -> int | None:
    """Returns a date with a time in nanoseconds, or None. Without an offset it counts as UTC; only differences matter."""
    match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    *fields, fraction, offset = match.groups()
    try:
        moment = datetime(*map(int, fields), tzinfo=timezone.utc)  # type: ignore[arg-type, misc]
    except ValueError:
        return None
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    if offset not in (None, "Z"):
        seconds -= int(f"{offset[0]}1") * (int(offset[1:3]) * 3600 + int(offset[-2:]) * 60)
    return seconds * _NANOSECONDS + int((fraction or "").ljust(9, "0"))


def _count(where: str, value: Any, name: str, least: int) -> int:
    number = _number(value)
    if number is None or not number.is_integer() or not least <= number <= LARGEST_LIMIT:
        raise SpecError(
            where, f"has {_shown(value)} {name}", f"a whole number from {least} to {LARGEST_LIMIT:,}"
        )
    return int(number)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = shortened(text, _MAX_SHOWN_CHARS)
    return repr(text) if isinstance(value, str) else text
