"""Checks of what graphs become: options, operators, writes in place, front ends, and the numbers of larger parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aotgaudi.doctor.hpu.checks.recipes import MAX_ERROR
from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding, judged, skipped, unclear
from aotgaudi.doctor.hpu.lab import Lab, Outcome

PASSED_OPTIONS: Mapping[str, object] = {
    "use_eager_fallback": False,
    "keep_input_mutations": True,
    "use_graph_freezing": False,
}
"""Options of the backend that a build passes."""

_MIB = 1 << 20
_CACHE_ROWS = 1 << 18
_VOCABULARY = 32_000


def _options(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("lowering.options", values=dict(PASSED_OPTIONS))
    if not outcome.is_whole:
        yield from unclear(("K-05",), outcome)
        return
    refused = outcome.values["refused"]
    why = "; ".join(f"{name}: {problem}" for name, problem in refused.items())
    yield judged("K-05", not refused, ", ".join(PASSED_OPTIONS), why)


def _fallbacks(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("lowering.fallbacks")
    if not outcome.is_whole:
        yield from unclear(("K-18", "K-34"), outcome)
        return
    values = outcome.values
    yield judged("K-18", bool(values["not_lowered"]), "an error", "it fell back without a word")
    if not values["not_lowered"]:
        yield from skipped(("K-34",), "K-18 was refuted")
        return
    holds = bool(values["view"]) and not values["copy_of_view"]
    lacks = values["copy_of_view"] or "a view is taken"
    yield judged("K-34", holds, "a view is an error, its copy is not", lacks)


def _operators(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("lowering.operators")
    if not outcome.is_whole:
        yield from unclear(("K-19",), outcome)
        return
    values = outcome.values
    wrong = [name for name, error in values["errors"].items() if error > MAX_ERROR]
    bad = sorted({*values["failed"], *values["fell_back"], *wrong})
    yield judged("K-19", not bad, f"all {len(values['errors'])}", f"not {', '.join(bad)}")


def _in_place(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("lowering.in_place", num_rows=_CACHE_ROWS)
    if not outcome.is_whole:
        yield from unclear(("K-21",), outcome)
        return
    values = outcome.values
    rise, cache = values["rise_bytes"] / _MIB, values["cache_bytes"] / _MIB
    seen = f"writing to {cache:.0f} MiB took {rise:.0f} MiB more"
    yield judged("K-21", values["is_written"] and rise < cache / 2, seen)


def _front_ends(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("lowering.front_ends")
    if not outcome.is_whole:
        yield judged("K-06", False, outcome.problem)
        return
    error, microseconds = (outcome.values[name] for name in ("direct_error", "dynamo_microseconds"))
    seen = f"{error:.1e} off; a call through Dynamo takes {microseconds} us"
    yield judged("K-06", error <= MAX_ERROR, seen)


def _attention(lab: Lab) -> Iterator[LineFinding]:
    yield _errors("K-24", lab.run("kernels.attention"))


def _sampler(lab: Lab) -> Iterator[LineFinding]:
    yield _errors("K-39", lab.run("kernels.sampler", vocab_size=_VOCABULARY))


def _flat_decode(lab: Lab) -> Iterator[LineFinding]:
    yield _errors("K-40", lab.run("kernels.flat_decode", batch=4, num_blocks=32))


def _errors(line: str, outcome: Outcome) -> LineFinding:
    if not outcome.is_whole:
        return LineFinding(line, "unclear", outcome.problem)
    name, error = max(outcome.values["errors"].items(), key=lambda row: float(row[1]))
    return judged(line, error <= MAX_ERROR, f"{error:.1e} off at most ({name})")


_NUMBERS = ("K-29", "K-37")

CHECKS = (
    HpuCheck("H-05", "options of the backend", ("K-05",), _options, _NUMBERS),
    HpuCheck("H-12", "what is not lowered", ("K-18", "K-34"), _fallbacks, _NUMBERS),
    HpuCheck("H-13", "the operators of our graphs", ("K-19",), _operators, _NUMBERS),
    HpuCheck("H-16", "writing to the KV cache", ("K-21",), _in_place, (*_NUMBERS, "K-19")),
    HpuCheck("H-17", "fused attention", ("K-24",), _attention, _NUMBERS),
    HpuCheck("H-18", "front ends", ("K-06",), _front_ends, _NUMBERS),
    HpuCheck("H-24", "the sampler", ("K-39",), _sampler, (*_NUMBERS, "K-19")),
    HpuCheck("H-25", "decode attention", ("K-40",), _flat_decode, (*_NUMBERS, "K-19")),
)
