"""From a spec to everything that must be warm: a pure function, with the same answer on every machine.

The order of work: the strategy's tables; distinct, ascending entries; the entries that close them; short queries, if the
spec has some; what follows from the decode batch sizes (sampler); what the other tables of the spec ask for (defrag, mhc,
vision).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from types import MappingProxyType
from typing import TypeVar

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import ReachableSteps, closing_entries
from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import find_strategy, find_unified
from aotgaudi.entries import (
    DecodeEntry,
    Entry,
    PromptEntry,
    SamplerEntry,
    UnifiedEntry,
)
from aotgaudi.errors import SpecError
from aotgaudi.manifest.side_entries import defrag_entries, mhc_entries, sampler_entries, vision_entries
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.spec.sampler import SamplerSpec

MAX_SAMPLER_ENTRIES = 1_000_000
"""Most sampler entries of a spec; one asks for some dozens."""

_E = TypeVar("_E", PromptEntry, DecodeEntry, UnifiedEntry)

_LEAST: Mapping[type[Entry], tuple[int, ...]] = MappingProxyType(
    {PromptEntry: (1, 1, 0), DecodeEntry: (1, 1, 1), UnifiedEntry: (1, 0, 0)}
)
"""The smallest value of each column; upstream's lists may hold buckets that no step can have."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The entries of the engine's steps: prompt and decode, or unified ones; distinct, ascending."""

    prompt: tuple[PromptEntry, ...] = ()
    decode: tuple[DecodeEntry, ...] = ()
    unified: tuple[UnifiedEntry, ...] = ()


def enumerate_entries(spec: BuildSpec) -> tuple[Entry, ...]:
    """Returns every entry of a spec, kind by kind in the order of ``ENTRY_KINDS``.

    Entries of a kind ascend; sampler, defrag and mhc entries are in warm-up order. A target that runs without
    graphs (execution mode ``eager``) has none.

    Raises:
        SpecError: the spec leaves no prompt or no decode entry, or asks for more than can be enumerated.
    """
    if spec.target.execution_mode == "eager":
        return ()
    steps = _with_short_queries(spec, _closed(spec, _steps(spec)))
    return (
        *steps.prompt,
        *steps.decode,
        *steps.unified,
        *vision_entries(spec),
        *_sampler_entries(steps.decode, spec.sampler),
        *defrag_entries(spec),
        *mhc_entries(spec),
    )


def _steps(spec: BuildSpec) -> _Steps:
    """The public table."""
    bucketing = spec.bucketing
    inputs = BucketingInputs.from_spec(spec.limits, bucketing)
    if bucketing.strategy == "unified":
        rows = find_unified(bucketing.version).unified_table(inputs)
        flagged = ((query, shared, unique, bool(causal)) for query, shared, unique, causal in rows)
        return _Steps(unified=_entries(UnifiedEntry, flagged))
    strategy = find_strategy(bucketing.version, bucketing.strategy)
    return _Steps(
        prompt=_entries(PromptEntry, strategy.prompt_table(inputs)),
        decode=_entries(DecodeEntry, strategy.decode_table(inputs)),
    )


def _entries(entry: type[_E], buckets: Iterable[tuple[int, ...]]) -> tuple[_E, ...]:
    """Distinct entries, ascending: upstream's lists may hold a bucket twice, or be in another order."""
    distinct = dict.fromkeys(sorted(buckets))
    for name, values, least in zip(entry.columns(), zip(*distinct, strict=True), _LEAST[entry], strict=False):
        if min(values) < least or max(values) > LARGEST_LIMIT:
            wrong = min(values) if min(values) < least else max(values)
            raise SpecError(
                "bucketing",
                f"gives a {entry.kind} entry with {name} {wrong:,}",
                f"{least:,} to {LARGEST_LIMIT:,}: other bounds, or lower limits",
            )
    return tuple(starmap(entry, distinct))


def _sampler_entries(decode: Iterable[DecodeEntry], sampler: SamplerSpec) -> tuple[SamplerEntry, ...]:
    batch_sizes = dict.fromkeys(entry.batch_size for entry in decode)
    num_entries = 2 * len(batch_sizes) * len(sampler.settings)
    if num_entries > MAX_SAMPLER_ENTRIES:
        raise SpecError(
            "sampler.settings",
            f"gives {num_entries:,} sampler entries: 2 for each of {len(sampler.settings):,} settings and"
            f" {len(batch_sizes):,} batch sizes",
            f"at most {MAX_SAMPLER_ENTRIES:,}: fewer settings, or a larger step of the decode batch sizes",
        )
    return sampler_entries(batch_sizes, sampler)


def _closed(spec: BuildSpec, steps: _Steps) -> _Steps:
    """The steps with the entries that close them, where the spec asks for that."""
    reachable = ReachableSteps.of(spec.limits, spec.bucketing, spec.scheduler)
    added = closing_entries(reachable, spec.bucketing, BucketTable(steps.prompt, steps.decode))
    return replace(
        steps,
        prompt=_inserted(steps.prompt, (entry for entry in added if isinstance(entry, PromptEntry))),
        decode=_inserted(steps.decode, (entry for entry in added if isinstance(entry, DecodeEntry))),
    )


def _with_short_queries(spec: BuildSpec, steps: _Steps) -> _Steps:
    """The steps with prompt entries of one row for each short query, after each context that prompts have."""
    contexts = {entry.num_ctx_blocks for entry in steps.prompt}
    short = {PromptEntry(1, query, ctx) for query in spec.bucketing.short_queries for ctx in contexts}
    return replace(steps, prompt=_inserted(steps.prompt, sorted(short.difference(steps.prompt))))


def _inserted(entries: tuple[_E, ...], added: Iterable[_E]) -> tuple[_E, ...]:
    """The ascending entries with a few more in their places: sorting a million anew takes a second."""
    merged = list(entries)
    for entry in added:
        insort(merged, entry)
    return tuple(merged)
