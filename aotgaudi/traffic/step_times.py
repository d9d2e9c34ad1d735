"""Work from measured step times: what a benchmark or a server says, in the place of the estimate (manifest/work.py).

The file is one of these:

* JSON: an object of entries as they are printed, each with its seconds, or an object with their median; or the result of
  ``benchmarks/bench_steps.py``, which has that under ``measurements.buckets``::

      {"(prompt, 1, 128, 0)": 0.0705, "(decode, 2, 1, 16)": {"median": 0.0311}}

* The text of ``/metrics`` of our server: ``aotgaudi_entry_step_seconds`` has the steps of each entry, and their seconds.

Few entries are measured, and tables are made of others. So the terms of the work are fitted to each kind: least squares of
the relative errors, in fractions, so that every machine finds the same. An entry counts as often as steps were measured in
it; where a file does not say how many, once. A term that would count for less than nothing is left out, the one that does
so most first. Work is in nanoseconds. What was measured is held to the fit as well: a table of means, in which a larger
entry may have taken less time by chance, would let it be chosen for that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.files import read_regular
from aotgaudi.manifest.work import StepEntry, Terms, WorkModel
from aotgaudi.traffic.exposition import Sample, is_exposition, samples_of

_ENTRY = re.compile(r"\((prompt|decode), (\d{1,9}), (\d{1,9}), (\d{1,9})\)", re.ASCII)
_BUCKET = re.compile(r"(\d{1,9}),(\d{1,9}),(\d{1,9})", re.ASCII)
_MAX_BYTES = 64 << 20
_NANOSECONDS = 10**9
_WANTED = '{"(prompt, 1, 128, 0)": seconds, "(decode, 2, 1, 16)": seconds, ...}, or the text of /metrics of our server'
_METRIC = "aotgaudi_entry_step_seconds"
_KINDS: Mapping[str, type[PromptEntry] | type[DecodeEntry]] = MappingProxyType(
    {"prompt": PromptEntry, "decode": DecodeEntry}
)


_EntryT = TypeVar("_EntryT", PromptEntry, DecodeEntry)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of one step, by the mean or the median of `num_steps`; None: the file did not say of how many."""

    seconds: Fraction
    num_steps: int | None = None

    @property
    def weight(self) -> int:
        """How often it counts."""
        return self.num_steps or 1


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured entries: at least one of each kind."""

    entries: Mapping[StepEntry, StepTime]

    def work(self, block_size: int) -> WorkModel:
        """Returns the work that is fitted to them."""
        per_step, per_token, per_pair, per_key = _fitted(
            [(_prompt_sizes(entry, block_size), time) for entry, time in self._of(PromptEntry)]
        )
        prompt = Terms(per_step=per_step, per_token=per_token, per_pair=per_pair, per_key=per_key)
        per_step, per_row, per_key = _fitted(
            [
                ((1, entry.batch_size, entry.num_blocks * block_size), time)
                for entry, time in self._of(DecodeEntry)
            ]
        )
        decode = Terms(per_step=per_step, per_row=per_row, per_key=per_key)
        return WorkModel(
            block_size=block_size, prompt=prompt, decode=decode, unit="ns", per_second=float(_NANOSECONDS)
        )

    def misses(self, work: WorkModel) -> tuple[float, float]:
        """Returns by what part of a measured time a fit misses it: the median over the entries, and the most."""
        errors = sorted(
            abs(Fraction(work.work(entry), _NANOSECONDS) / time.seconds - 1)
            for entry, time in self.entries.items()
        )
        return float(errors[(len(errors) - 1) // 2]), float(errors[-1])

    @property
    def num_steps(self) -> int | None:
        """How many steps were measured; None where the file did not say."""
        known = [time.num_steps for time in self.entries.values() if time.num_steps is not None]
        return sum(known) if len(known) == len(self.entries) else None

    def _of(self, kind: type[_EntryT]) -> Iterable[tuple[_EntryT, StepTime]]:
        return ((entry, time) for entry, time in self.entries.items() if isinstance(entry, kind))


def read_step_times(path: Path) -> StepTimes:
    """Returns what a file of step times says.

    Raises:
        SpecError: it cannot be read, or has no entries of a kind.
        MissingPackageError: it is the text of /metrics, and prometheus-client is not installed.
    """
    text = _text(path)
    entries = _of_metrics(path, text) if is_exposition(_first_line(text)) else _of_json(path, text)
    for kind, entry_type in _KINDS.items():
        if not any(isinstance(entry, entry_type) for entry in entries):
            raise SpecError(str(path), f"has no times of {kind} entries", _WANTED)
    return StepTimes(entries)


def _prompt_sizes(entry: PromptEntry, block_size: int) -> tuple[int, int, int, int]:
    tokens, keys = entry.batch_size * entry.query_len, entry.num_ctx_blocks * block_size
    return 1, tokens, tokens * (keys + entry.query_len), entry.batch_size * keys


def _fitted(samples: Sequence[tuple[tuple[int, ...], StepTime]]) -> list[int]:
    """The nanoseconds of each term, rounded; at least one of them is not 0."""
    used = list(range(len(samples[0][0])))
    while True:
        rows = [[Fraction(sizes[term]) / time.seconds for term in used] for sizes, time in samples]
        found = _solved(rows, [time.weight for _, time in samples])
        if found is None:  # Too few samples to tell the last term from the others.
            used.pop()
            continue
        least = min(range(len(used)), key=lambda index: found[index])
        if found[least] >= 0 or len(used) == 1:
            break
        used.pop(least)
    terms = [0] * len(samples[0][0])
    for term, value in zip(used, found, strict=True):
        terms[term] = max(0, round(value * _NANOSECONDS))
    return terms


def _solved(rows: Sequence[Sequence[Fraction]], weights: Sequence[int]) -> list[Fraction] | None:
    """The x for which ``rows @ x`` is nearest to 1 in every row, as often as it counts; None where there are several."""
    size = len(rows[0])
    weighed = [[weight * value for value in row] for row, weight in zip(rows, weights, strict=True)]
    matrix = [
        [
            sum((one[i] * row[j] for one, row in zip(weighed, rows, strict=True)), Fraction(0))
            for j in range(size)
        ]
        + [sum((one[i] for one in weighed), Fraction(0))]
        for i in range(size)
    ]
    for column in range(size):
        pivot = next((row for row in range(column, size) if matrix[row][column]), None)
        if pivot is None:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        head = matrix[column][column]
        matrix[column] = [value / head for value in matrix[column]]
        for row in range(size):
            if row != column:
                factor = matrix[row][column]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [row[-1] for row in matrix]


def _text(path: Path) -> str:
    try:
        return read_regular(path, _MAX_BYTES).decode()
    except FileNotFoundError as error:
        raise SpecError(str(path), "is not there", _WANTED) from error
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"is not UTF-8 text: {error.reason}", _WANTED) from error


def _first_line(text: str) -> str:
    first = text.lstrip().split("\n", 1)[0]
    return "" if first.startswith(("{", "[")) else first


# Of /metrics


def _of_metrics(path: Path, text: str) -> dict[StepEntry, StepTime]:
    """The mean of each entry; one that has several samples, of several servers, by all of them. `other` is left out."""
    counts: dict[StepEntry, Fraction] = {}
    seconds: dict[StepEntry, Fraction] = {}
    for sample in samples_of(path, text, _WANTED):
        totals = {f"{_METRIC}_count": counts, f"{_METRIC}_sum": seconds}.get(sample.name)
        entry = _labelled(sample)
        if totals is not None and entry is not None:
            if not 0 <= sample.value < math.inf:
                raise SpecError(str(path), f"has {sample.name} {sample.value} of {entry}", "as it was served")
            totals[entry] = totals.get(entry, Fraction(0)) + Fraction(sample.value)
    return {
        entry: StepTime(_rounded(seconds[entry] / num), round(num))
        for entry, num in counts.items()
        if num and seconds.get(entry)
    }


def _labelled(sample: Sample) -> StepEntry | None:
    kind = _KINDS.get(sample.labels.get("kind", ""))
    bucket = _BUCKET.fullmatch(sample.labels.get("bucket", ""))
    return None if kind is None or bucket is None else kind(*map(int, bucket.groups()))


# Of JSON


def _of_json(path: Path, text: str) -> dict[StepEntry, StepTime]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(str(path), f"is neither JSON nor the text of /metrics: {error}", _WANTED) from error
    measurements = value.get("measurements") if isinstance(value, dict) else None
    buckets = measurements.get("buckets") if isinstance(measurements, dict) else value
    if not isinstance(buckets, dict):
        raise SpecError(str(path), "has no entries", _WANTED)
    return dict(_step_time(path, name, one) for name, one in buckets.items())


def _step_time(path: Path, name: str, value: Any) -> tuple[StepEntry, StepTime]:
    match = _ENTRY.fullmatch(name)
    seconds = value.get("median") if isinstance(value, Mapping) else value
    if (
        match is None
        or isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 < seconds < math.inf
    ):
        raise SpecError(str(path), f"has {name!r}: {json.dumps(seconds)[:40]}", _WANTED)
    kind, *numbers = match.groups()
    return _KINDS[kind](*map(int, numbers)), StepTime(_rounded(Fraction(seconds)))


def _rounded(seconds: Fraction) -> Fraction:
    """To whole nanoseconds, 1 at least."""
    return Fraction(round(seconds * _NANOSECONDS) or 1, _NANOSECONDS)
