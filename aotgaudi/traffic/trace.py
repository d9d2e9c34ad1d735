"""Traces: when requests came, and how many tokens their prompts and answers had. Read from files, or drawn from histograms.

A trace file may have any of these formats, gzipped or not. Its first line tells which.

==========  =========================================================================================
CSV         a header, then a request a line; the public Azure and BurstGPT traces work unchanged
JSONL       an object a line
our log     of ``serve --log-format json --access-log``; lines of requests that generated tokens are used
Prometheus  the text of ``/metrics``, vLLM's or ours; it has only histograms, so a trace is drawn
==========  =========================================================================================

Columns and keys may have any of the names in `_NAMES`. Case, blanks, dashes and underscores do not matter, and other columns
are ignored. Times are seconds, or ISO 8601 dates with a time, to the nanosecond.

**Drawing.** Histograms say how many prompts and how many answers had up to 100 tokens, 200, 500 and so on. They do not say
which prompt had which answer, or when requests came.

* *Tokens.* Request i of n has the size at rank ``(i + 1/2) / n``, at the rank's place within its bucket. So each bucket
  has its share, and sizes are spread evenly within a bucket. Sizes above the last bound are spread up to the model's length.
* *Pairs.* Prompts and answers are shuffled independently, as if they did not depend on each other.
* *Times.* Arrivals are spread at random over ``n / requests_per_second`` seconds, like a Poisson process of that rate. A
  server whose requests come in waves has larger batches at times.

The generator has a fixed seed, and only its `random()` is used, which is the same on every machine and Python version.
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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from aotgaudi.errors import SpecError, shortened
from aotgaudi.files import open_regular
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.traffic.exposition import PREFIXES, is_exposition, samples_of

MAX_REQUESTS = 2_000_000
"""The most requests of a trace, which take some minutes of replay and 200 MB."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. All attributes have one item per request.

    Attributes:
        arrivals: Seconds since the first arrival, ascending.
        prompt_tokens: Tokens of each prompt, at least 1.
        generated_tokens: Tokens of each answer; 0 without an answer.

    Raises:
        SpecError: The trace is empty, or a number breaks these rules.
    """

    arrivals: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.arrivals), len(self.prompt_tokens), len(self.generated_tokens)}
        _require(len(lengths) == 1, "has columns of different lengths", "one item a request in each")
        _require(bool(self.arrivals), "has no requests", "at least one")
        _require(len(self.arrivals) <= MAX_REQUESTS, "has too many requests", f"at most {MAX_REQUESTS:,}")
        _require(all(map(math.isfinite, self.arrivals)), "has a time that is not finite", "seconds")
        _require(all(a <= b for a, b in pairwise(self.arrivals)), "has times out of order", "ascending times")
        _require(min(self.prompt_tokens) >= 1, "has a prompt without tokens", "1 token or more")
        _require(min(self.generated_tokens) >= 0, "has a negative number of tokens", "0 or more")

    def __len__(self) -> int:
        return len(self.arrivals)

    def faster(self, factor: float) -> Trace:
        """Returns the same requests with arrivals `factor` times as fast."""
        since = tuple(arrival / factor for arrival in self.arrivals)
        return Trace(since, self.prompt_tokens, self.generated_tokens)


@dataclass(frozen=True, slots=True)
class Drawing:
    """What `/metrics` does not say about a trace that is drawn from its histograms.

    `max_model_len` is where the last, unbounded bucket ends. As many requests are drawn as were counted, at most 20,000.
    """

    requests_per_second: float
    max_model_len: int


def _require(is_right: bool, problem: str, remedy: str) -> None:
    if not is_right:
        raise SpecError("trace", problem, remedy)


MOST_DRAWN = 20_000
"""The most requests that are drawn. Their sizes represent any server well enough."""

_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"request_prompt_tokens": "prompts", "request_generation_tokens": "answers"}
)
_WANTED_HISTOGRAMS = "those of vLLM, vllm:request_prompt_tokens and vllm:request_generation_tokens, or ours"


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram. `bounds` ascend, and the last is infinite. `counts` are cumulative, up to each bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    def sizes(self, num: int, most: int) -> list[int]:
        """Returns `num` sizes of 1 to `most` tokens, ascending, drawn as described in the module."""
        total, bucket = self.counts[-1], 0
        sizes = []
        for index in range(num):
            rank = (2 * index + 1) * total  # The numerator, over 2 * num.
            while self.counts[bucket] * 2 * num < rank:
                bucket += 1
            below = self.counts[bucket - 1] if bucket else 0
            low = int(self.bounds[bucket - 1]) if bucket else 0
            high = max(low + 1, int(min(self.bounds[bucket], most)))
            share = 2 * num * (self.counts[bucket] - below)
            sizes.append(min(most, max(1, low - -((rank - below * 2 * num) * (high - low)) // share)))
        return sizes


def drawn_trace(path: Path, text: str, drawing: Drawing | None) -> Trace:
    """Returns a trace that is drawn from the histograms in `text`, which was read from `path`.

    Raises:
        SpecError: A histogram is missing or empty, or `drawing` is None.
    """
    prompts, answers = (_histogram(path, text, suffix) for suffix in _SUFFIXES)
    if drawing is None:
        raise SpecError(
            str(path), "has histograms, which do not say when requests came", "--requests-per-second"
        )
    num = min(prompts.counts[-1], answers.counts[-1], MOST_DRAWN)
    random, most = Random(0), drawing.max_model_len - 1  # noqa: S311 - sizes, not secrets
    seconds = num / drawing.requests_per_second
    return Trace(
        prompt_tokens=tuple(_shuffled(prompts.sizes(num, most), random)),
        generated_tokens=tuple(_shuffled(answers.sizes(num, most), random)),
        arrivals=tuple(_since_first(sorted(random.random() * seconds for _ in range(num)))),
    )


def _since_first(moments: Sequence[float]) -> Iterable[float]:
    return (moment - moments[0] for moment in moments)


def _shuffled(sizes: Sequence[int], random: Random) -> list[int]:
    keys = [random.random() for _ in sizes]
    return [size for _, size in sorted(zip(keys, sizes, strict=True))]


def _histogram(path: Path, text: str, suffix: str) -> Histogram:
    """Returns the histogram of this name, summed over labels (models, engines). Our own server has it under two names."""
    noun = _SUFFIXES[suffix]
    buckets = _buckets(path, text)
    names = {name for name, _, _ in buckets}  # A server may have the same histogram under several names.
    own = next((f"{prefix}{suffix}_bucket" for prefix in PREFIXES if f"{prefix}{suffix}_bucket" in names), "")
    by_bound: dict[float, float] = defaultdict(float)
    for name, bound, count in buckets:
        if name == own:
            by_bound[bound] += count
    if math.inf not in by_bound:
        raise SpecError(str(path), f"has no histogram of the tokens of {noun}", _WANTED_HISTOGRAMS)
    bounds = sorted(by_bound)
    counts = [by_bound[bound] for bound in bounds]
    is_right = all(math.isfinite(count) and count >= 0 for count in counts) and counts == sorted(counts)
    if not is_right:
        raise SpecError(
            str(path), f"has a histogram of {noun} whose counts do not ascend", "as it was served"
        )
    if not counts[-1]:
        raise SpecError(
            str(path), f"has a histogram of {noun} that has counted nothing", "one after some traffic"
        )
    return Histogram(tuple(bounds), tuple(map(int, counts)))


def _buckets(path: Path, text: str) -> list[tuple[str, float, float]]:
    """Returns the name, bound and count of every bucket in a text."""
    try:
        return [
            (one.name, float(one.labels["le"]), one.value)
            for one in samples_of(path, text, _WANTED_HISTOGRAMS)
            if one.name.endswith("_bucket")
        ]
    except (ValueError, KeyError) as error:
        raise SpecError(str(path), f"is not what /metrics answers: {error}", _WANTED_HISTOGRAMS) from error


_MAX_LINE_CHARS = 1 << 20
_MAX_SHOWN_CHARS = 40
_GZIP_MAGIC = b"\x1f\x8b"
_WANTED_TRACE = "a CSV with a header, a JSON object a line, or the text of /metrics"

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
    """Returns the trace in a file. From histograms, it draws a trace, which is the same each time.

    Raises:
        SpecError: the file has a mistake (the error names file, line and remedy), or has histograms and `drawing` is None.
    """
    with _opened(path) as lines:
        first = next((line for line in lines if line.text.strip()), None)
        if first is None:
            raise SpecError(str(path), "is empty", _WANTED_TRACE)
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
    """Yields the lines of a file without line ends, one by one, without holding the whole file in memory."""
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
        raise SpecError(str(path), f"is not UTF-8 text: {error.reason}", _WANTED_TRACE) from error
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
    """A row. `values` are time, prompt tokens and generated tokens, as written in the file."""

    number: int
    values: tuple[Any, Any, Any]


def _from_csv(path: Path, lines: Iterable[_Line]) -> Iterator[_Row]:
    rows = csv.reader(line.text for line in lines)  # One row per line: numbers need no quoted line ends.
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
    """Returns the requests of a server's log by arrival. The log has them in the order in which they ended."""
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
    """Returns the fields of a line of our JSON log; None for another program's line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return (
        value if isinstance(value, dict) and {"time", "level", "logger", "message"} <= value.keys() else None
    )


def _places(where: str, given: Sequence[str], noun: str) -> tuple[int, int, int]:
    """Returns the places of time, prompt tokens and generated tokens among the `given` names."""
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
    text = shortened(text, _MAX_SHOWN_CHARS)
    return repr(text) if isinstance(value, str) else text
