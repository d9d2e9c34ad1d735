"""Work from measured step times: what a benchmark of a bundle says, in the place of the estimate (manifest/work.py).

The file is JSON: an object of entries as they are printed, each with its seconds, or an object with their median; or the
result of ``benchmarks/bench_steps.py``, which has that under ``measurements.buckets``::

    {"(prompt, 1, 128, 0)": 0.0705, "(decode, 2, 1, 16)": {"median": 0.0311}}

Few entries are measured, and tables are made of others. So the terms of the work are fitted to each kind: least squares of
the relative errors, in fractions, so that every machine finds the same. A term that would count for less than nothing is
left out, the one that does so most first. Work is in nanoseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.work import StepEntry, Terms, WorkModel
from aotgaudi.regularfile import read_regular

_ENTRY = re.compile(r"\((prompt|decode), (\d{1,9}), (\d{1,9}), (\d{1,9})\)", re.ASCII)
_MAX_BYTES = 64 << 20
_NANOSECONDS = 10**9
_WANTED = '{"(prompt, 1, 128, 0)": seconds, "(decode, 2, 1, 16)": seconds, ...}'


def measured_work(path: Path, block_size: int) -> WorkModel:
    """Returns the work that a file of step times stands for.

    Raises:
        SpecError: it cannot be read, or has too few entries of a kind to tell the terms apart.
    """
    seconds = _step_times(path)
    prompts = {entry: value for entry, value in seconds.items() if isinstance(entry, PromptEntry)}
    decodes = {entry: value for entry, value in seconds.items() if isinstance(entry, DecodeEntry)}
    for kind, found in (("prompt", prompts), ("decode", decodes)):
        if not found:
            raise SpecError(str(path), f"has no times of {kind} entries", _WANTED)
    per_step, per_token, per_pair, per_key = _fitted(
        [(_prompt_sizes(entry, block_size), value) for entry, value in prompts.items()]
    )
    prompt = Terms(per_step=per_step, per_token=per_token, per_pair=per_pair, per_key=per_key)
    per_step, per_row, per_key = _fitted(
        [((1, entry.batch_size, entry.num_blocks * block_size), value) for entry, value in decodes.items()]
    )
    decode = Terms(per_step=per_step, per_row=per_row, per_key=per_key)
    return WorkModel(
        block_size=block_size, prompt=prompt, decode=decode, unit="ns", per_second=float(_NANOSECONDS)
    )


def _prompt_sizes(entry: PromptEntry, block_size: int) -> tuple[int, int, int, int]:
    tokens, keys = entry.batch_size * entry.query_len, entry.num_ctx_blocks * block_size
    return 1, tokens, tokens * (keys + entry.query_len), entry.batch_size * keys


def _fitted(samples: Sequence[tuple[tuple[int, ...], Fraction]]) -> list[int]:
    """The nanoseconds of each term, rounded; at least one of them is not 0."""
    used = list(range(len(samples[0][0])))
    while True:
        found = _solved([[Fraction(sizes[term]) / seconds for term in used] for sizes, seconds in samples])
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


def _solved(rows: Sequence[Sequence[Fraction]]) -> list[Fraction] | None:
    """The x for which ``rows @ x`` is nearest to 1 in every row; None where there are several."""
    size = len(rows[0])
    matrix = [
        [sum((row[i] * row[j] for row in rows), Fraction(0)) for j in range(size)]
        + [sum((row[i] for row in rows), Fraction(0))]
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


def _step_times(path: Path) -> dict[StepEntry, Fraction]:
    try:
        value = json.loads(read_regular(path, _MAX_BYTES))
    except FileNotFoundError as error:
        raise SpecError(str(path), "is not there", _WANTED) from error
    except (ValueError, RecursionError) as error:
        raise SpecError(str(path), f"is not JSON: {error}", _WANTED) from error
    measurements = value.get("measurements") if isinstance(value, dict) else None
    buckets = measurements.get("buckets") if isinstance(measurements, dict) else value
    if not isinstance(buckets, dict):
        raise SpecError(str(path), "has no entries", _WANTED)
    return dict(_step_time(path, name, one) for name, one in buckets.items())


def _step_time(path: Path, name: str, value: Any) -> tuple[StepEntry, Fraction]:
    match = _ENTRY.fullmatch(name)
    seconds = value.get("median") if isinstance(value, Mapping) else value
    if match is None or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise SpecError(str(path), f"has {name!r}: {json.dumps(seconds)[:40]}", _WANTED)
    kind, *numbers = match.groups()
    entry = (PromptEntry if kind == "prompt" else DecodeEntry)(*map(int, numbers))
    return entry, Fraction(round(seconds * _NANOSECONDS) or 1, _NANOSECONDS)
