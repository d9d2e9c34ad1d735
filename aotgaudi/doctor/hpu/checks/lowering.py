"""Checks of what graphs become: operators, writes in place, front ends, and the numbers of larger parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aotgaudi.doctor.hpu.checks.graphs import MAX_ERROR, NUMBERS
from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding, judged, skipped
from aotgaudi.doctor.hpu.lab import Lab

_MIB = 1 << 20
_CACHE_ROWS = 1 << 18
_VOCABULARIES = (32_000, 128_256)
_DECODE_SIZES = ((1, 8), (4, 32), (16, 128))
"""Sequences, and blocks that they have in all."""


def _fallbacks(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.fallbacks").required()
    if not values["not_lowered"] and not values["num_outside"]:
        yield from skipped(("K-18",), "this release lowers addcmul, by which it would be seen")
    else:
        yield judged("K-18", bool(values["not_lowered"]), "an error", "it fell back without a word")
        if not values["not_lowered"]:
            yield from skipped(("K-34",), "K-18 was refuted")
            return
    holds = bool(values["view"]) and not values["copy_of_view"]
    lacks = values["copy_of_view"] or "a view is taken"
    yield judged("K-34", holds, "a view is an error, its copy is not", lacks)


def _operators(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.operators").required()
    wrong = [name for name, error in values["errors"].items() if error > MAX_ERROR]
    bad = sorted({*values["failed"], *values["fell_back"], *wrong})
    yield judged("K-19", not bad, f"all {len(values['errors'])}", f"not {', '.join(bad)}")


def _in_place(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.in_place", num_rows=_CACHE_ROWS).required()
    rise, cache = values["rise_bytes"] / _MIB, values["cache_bytes"] / _MIB
    seen = f"writing to {cache:.0f} MiB took {rise:.0f} MiB more"
    yield judged("K-21", values["is_written"] and rise < cache / 2, seen)


def _front_ends(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("lowering.front_ends").required()
    if values["problem"]:
        yield judged("K-06", False, values["problem"])
        return
    error, keys = values["direct_error"], "the same keys" if values["has_same_keys"] else "other keys"
    seen = (
        f"{error:.1e} off, {keys}; a call takes {values['direct_microseconds']} us,"
        f" through Dynamo {values['dynamo_microseconds']} us"
    )
    yield judged("K-06", error <= MAX_ERROR, seen)


def _attention(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("kernels.attention").required()
    schema = f"; {values['schema']}"
    if values["problem"]:
        yield judged("K-24", False, f"{values['problem']}{schema}")
        return
    name, error = _worst(values)
    yield judged("K-24", error <= MAX_ERROR, f"{error:.1e} off at most ({name}){schema}")


def _sampler(lab: Lab) -> Iterator[LineFinding]:
    name, error = _worst(lab.run("kernels.sampler", vocab_sizes=_VOCABULARIES).required())
    yield judged("K-39", error <= MAX_ERROR, f"{error:.1e} off at most ({name})")


def _flat_decode(lab: Lab) -> Iterator[LineFinding]:
    name, error = _worst(lab.run("kernels.flat_decode", sizes=_DECODE_SIZES).required())
    yield judged("K-40", error <= MAX_ERROR, f"{error:.1e} off at most ({name})")


def _worst(values: Mapping[str, Any]) -> tuple[str, float]:
    """The largest error, and what it is of."""
    errors: Mapping[str, float] = values["errors"]
    return max(errors.items(), key=lambda row: row[1])


CHECKS = (
    HpuCheck("H-12", "what is not lowered", ("K-18", "K-34"), _fallbacks, NUMBERS),
    HpuCheck("H-13", "the operators of our graphs", ("K-19",), _operators, NUMBERS),
    HpuCheck("H-16", "writing to the KV cache", ("K-21",), _in_place, (*NUMBERS, "K-19")),
    HpuCheck("H-17", "fused attention", ("K-24",), _attention, NUMBERS),
    HpuCheck("H-18", "front ends", ("K-06",), _front_ends, NUMBERS),
    HpuCheck("H-24", "the sampler", ("K-39",), _sampler, (*NUMBERS, "K-19")),
    HpuCheck("H-25", "decode attention", ("K-40",), _flat_decode, (*NUMBERS, "K-19")),
)
