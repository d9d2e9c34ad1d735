"""The cost of a step, padding included. `aotgaudi tune` minimizes this cost, and reports measure padding by it.

The work of an entry is a sum of integers. Let B be the block size::

    prompt (b, q, c)   rows b    tokens b * q   pairs b * q * (c * B + q)   keys b * c * B
    decode (b, 1, n)   rows b    tokens b       pairs n * B                 keys n * B

    work = step + rows * per_row + tokens * per_token + pairs * per_pair + keys * per_key

**Estimated** (`WorkModel.of`), in floating-point operations. A token passes all weights of attention and of the feed-forward
part, with two operations each. In a mixture of experts, it passes only the weights of its experts. A row passes the head. A
pair of query and key takes 2 operations per query head for each number of the row that the layer keeps of a token, both as a
key and as a value (``spec/cache_rows.py``). If a layer keeps one row for several tokens, it has proportionally fewer pairs.
Windows count as whole contexts. Reading a token's rows from memory counts as the operations that the device could have done
in that time (`Device.balance`). Costs that are the same for every step, above all reading the weights, are equal for all
tables and left out.

**Measured** (`read_step_times`), in nanoseconds, with a fixed cost per step. The file is one of these:

* JSON: printed entries, each with its seconds or with an object that has the ``median``; or the result of
  ``benchmarks/bench_steps.py``, which has these under ``measurements.buckets``::

      {"(prompt, 1, 128, 0)": 0.0705, "(decode, 2, 1, 16)": {"median": 0.0311}}

* The text of our server's ``/metrics``: ``aotgaudi_entry_step_seconds`` has the steps of each entry and their seconds.

Few entries are measured, and tables consist of others, so the terms are fitted for each kind. The fit minimizes the squares
of relative errors, in fractions, so that every machine finds the same result. An entry counts as often as its steps were
measured, or once if the file does not say. Negative terms are left out, the most negative first. Measured entries are also
judged by the fit, because in a table of means, chance can make a larger entry look faster than a smaller one.
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

from aotgaudi.entries import DecodeEntry, PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.files import read_regular
from aotgaudi.manifest.cost import kv_bytes_read_per_token
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.cache_rows import family_of, rows_of
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parallel import ParallelSpec
from aotgaudi.traffic.exposition import Sample, is_exposition, samples_of


@dataclass(frozen=True, slots=True)
class Device:
    """A device's peak rates as stated by its maker: operations a second (16-bit, dense), bytes a second from memory."""

    teraflops: int
    gigabytes: int
    source: str

    @property
    def balance(self) -> int:
        """How many operations take as long as reading a byte from memory."""
        return round(1000 * self.teraflops / self.gigabytes)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "gaudi2": Device(432, 2450, "Intel Gaudi 2 AI accelerator: BF16 matrix engine, HBM2E"),
        "gaudi3": Device(1835, 3700, "Intel Gaudi 3 AI Accelerator White Paper: BF16 matrix engine, HBM2e"),
        "h100": Device(989, 3350, "NVIDIA H100 Tensor Core GPU data sheet: SXM5, BF16 without sparsity"),
        "h200": Device(989, 4800, "NVIDIA H200 Tensor Core GPU data sheet: SXM, BF16 without sparsity"),
        "cpu": Device(2, 100, "assumed: some cores of a server; measure yours"),
    }
)
_BY_BACKEND = {"hpu": "gaudi3", "cuda": "h100", "cpu": "cpu", "fake": "cpu"}


def device_of(spec: BuildSpec, name: str | None = None) -> Device:
    """Returns a device of `DEVICES`. The default is the profile of the spec's target, or the usual one of its backend."""
    profile = spec.target.profile
    return DEVICES[
        name or (profile if profile in DEVICES and profile is not None else _BY_BACKEND[spec.target.backend])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The weights of a step's sizes in its work."""

    per_step: int = 0
    per_row: int = 0
    per_token: int = 0
    per_pair: int = 0
    per_key: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """Computes work in `unit`. A step takes `step_seconds`, and a second for each `per_second` of its work."""

    block_size: int
    prompt: Terms
    decode: Terms
    unit: str
    per_second: float
    step_seconds: float = 0.0

    @classmethod
    def of(cls, spec: BuildSpec, device: Device) -> WorkModel:
        """Returns the estimate for a model on a device that reaches half of its peak rate.

        Raises:
            SpecError: the model's config lacks a size.
        """
        model = spec.model
        whole = spec.model_copy(update={"parallel": ParallelSpec()})  # Whatever the number of ranks.
        weights, key_bytes = _weights_per_token(model), kv_bytes_read_per_token(whole)
        terms = Terms(
            per_row=2 * model.hidden_size * model.vocab_size,
            per_token=2 * weights,
            per_pair=2 * model.num_attention_heads * _attended_per_token(model, spec.limits.block_size),
            per_key=key_bytes * device.balance,
        )
        weight_bytes = 2 * (weights + model.hidden_size * model.vocab_size)
        return cls(
            block_size=spec.limits.block_size,
            prompt=terms,
            decode=terms,
            unit="FLOP",
            per_second=device.teraflops * 1e12 / 2,
            step_seconds=2 * weight_bytes / (device.gigabytes * 1e9),
        )

    def work(self, entry: StepEntry) -> int:
        """Returns the work of a step that fills `entry`."""
        if isinstance(entry, PromptEntry):
            return self.prompt_work(entry.query_len, entry.num_ctx_blocks, entry.batch_size)
        return self.decode_work(entry.num_blocks, entry.batch_size)

    def prompt_work(self, query_len: int, num_ctx_blocks: int, batch_size: int = 1) -> int:
        """Returns the work of chunks of prompts."""
        terms, keys = self.prompt, num_ctx_blocks * self.block_size
        each = (
            terms.per_row
            + query_len * (terms.per_token + (keys + query_len) * terms.per_pair)
            + keys * terms.per_key
        )
        return terms.per_step + batch_size * each

    def decode_work(self, num_blocks: int, batch_size: int) -> int:
        """Returns the work of one token for each of `batch_size` sequences."""
        terms, keys = self.decode, num_blocks * self.block_size
        rows = batch_size * (terms.per_row + terms.per_token)
        return terms.per_step + rows + keys * (terms.per_pair + terms.per_key)

    def seconds(self, entry: StepEntry) -> float:
        """Returns how long a step of `entry` takes in this model."""
        return self.step_seconds + self.work(entry) / self.per_second


def _weights_per_token(model: ModelSpec) -> int:
    """Returns the number of weights that a token passes, without embedding and head."""
    experts = model.config.get("num_experts_per_tok")
    wide = model.config.get("moe_intermediate_size") if isinstance(experts, int) else None
    width = wide if isinstance(wide, int) else model.intermediate_size
    num_experts = experts if isinstance(experts, int) and not isinstance(experts, bool) else 1
    if num_experts < 1:
        raise SpecError("model.config.num_experts_per_tok", f"is {num_experts}", "a positive integer")
    return model.num_layers * (_projections(model) + 3 * model.hidden_size * num_experts * width)


def _attended_per_token(model: ModelSpec, block_size: int) -> int:
    """Returns how many numbers of a token's rows a query head multiplies with in all layers, as keys and as values."""
    values = 0
    for cache in rows_of(model):
        if cache.part:  # The source rows of compression, and the indexer's keys.
            continue
        width = 2 * cache.width
        if family_of(model) == "latent":  # The values are the first part of a row.
            width -= _size(model, "qk_rope_head_dim")
        values += width * cache.rows_per_block(block_size)
    return values // block_size


def _projections(model: ModelSpec) -> int:
    """Returns the number of weights of a layer's attention. Latent attention multiplies by the halves of ``kv_b_proj``."""
    family, heads, hidden = family_of(model), model.num_attention_heads, model.hidden_size
    if family == "uniform":
        return hidden * 2 * (heads + model.num_kv_heads) * model.head_dim
    rank = model.config_value("q_lora_rank")
    if family == "latent":
        latent, rotated = _size(model, "kv_lora_rank"), _size(model, "qk_rope_head_dim")
        unrotated, value = _size(model, "qk_nope_head_dim"), _size(model, "v_head_dim")
        asked, kept = heads * (unrotated + rotated), latent + rotated
        given = heads * (latent * (unrotated + value) + value * hidden)
    else:
        asked, kept = heads * model.head_dim, model.head_dim
        given = _size(model, "o_lora_rank") * (asked + _size(model, "o_groups") * hidden)
    queries = rank * (hidden + asked) if isinstance(rank, int) else hidden * asked
    return queries + hidden * kept + given


def _size(model: ModelSpec, name: str) -> int:
    value = model.config_value(name)
    if type(value) is not int or value < 1:
        raise SpecError(
            f"model.config.{name}", "is missing" if value is None else f"is {value!r}", "a positive integer"
        )
    return value


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
    """The seconds of one step, as a mean or median over `num_steps` (None if the file does not say how many)."""

    seconds: Fraction
    num_steps: int | None = None

    @property
    def weight(self) -> int:
        """How often it counts in the fit."""
        return self.num_steps or 1


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured entries, at least one of each kind."""

    entries: Mapping[StepEntry, StepTime]

    def work(self, block_size: int) -> WorkModel:
        """Returns the work model fitted to these entries."""
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
        """Returns the median and the largest relative error of a fit against the measured times."""
        errors = sorted(
            abs(Fraction(work.work(entry), _NANOSECONDS) / time.seconds - 1)
            for entry, time in self.entries.items()
        )
        return float(errors[(len(errors) - 1) // 2]), float(errors[-1])

    @property
    def num_steps(self) -> int | None:
        """How many steps were measured; None if the file does not say."""
        known = [time.num_steps for time in self.entries.values() if time.num_steps is not None]
        return sum(known) if len(known) == len(self.entries) else None

    def _of(self, kind: type[_EntryT]) -> Iterable[tuple[_EntryT, StepTime]]:
        return ((entry, time) for entry, time in self.entries.items() if isinstance(entry, kind))


def read_step_times(path: Path) -> StepTimes:
    """Reads a file of step times.

    Raises:
        SpecError: the file cannot be read, or has no entries of one of the kinds.
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
    """Returns the nanoseconds of each term, rounded. At least one is not 0."""
    used = list(range(len(samples[0][0])))
    while True:
        rows = [[Fraction(sizes[term]) / time.seconds for term in used] for sizes, time in samples]
        found = _solved(rows, [time.weight for _, time in samples])
        if found is None:  # Too few samples to separate the last term from the others.
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
    """Returns the x for which ``rows @ x``, with weighted rows, is nearest to 1; None if it is not unique."""
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
    """Returns the mean of each entry over the samples of all servers. Leaves out `other`."""
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
    """Returns `seconds`, rounded to whole nanoseconds, at least 1."""
    return Fraction(round(seconds * _NANOSECONDS) or 1, _NANOSECONDS)
