"""What each entry has done, as metrics: by kind and bucket, so many buckets at most, and the rest together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from aotgaudi.engine.tallies import GAP_BOUNDS, TalliesSnapshot, Tally, Total
from aotgaudi.entries import Entry

MAX_BUCKETS = 200
"""So many entries have a label of their own: those that ran first, so that no figure ever changes its label."""
OTHER = "other"

_LABELS = ("kind", "bucket")

_TOTALS: Mapping[str, tuple[str, Callable[[Tally], Total]]] = MappingProxyType(
    {
        "aotgaudi_entry_step_seconds": ("Steps of an entry, and their seconds.", lambda tally: tally.steps),
        "aotgaudi_entry_queue_seconds": (
            "Requests whose first chunk an entry computed, and how long they had waited.",
            lambda tally: tally.queue,
        ),
        "aotgaudi_entry_first_token_seconds": (
            "First tokens that an entry gave, and the time from the request's arrival.",
            lambda tally: tally.first_token,
        ),
        "aotgaudi_entry_inter_token_seconds": (
            "Further tokens that an entry gave, and the time since the token before.",
            lambda tally: tally.gaps,
        ),
    }
)


def bucket_of(entry: Entry) -> str:
    """Returns the numbers of an entry, as a label: ``8,1,64``."""
    return ",".join(map(str, entry.row()))


def labelled(
    entries: Mapping[Entry, Tally], most: int = MAX_BUCKETS
) -> Iterator[tuple[tuple[str, str], Tally]]:
    """Yields labels and figures: those of the first `most` entries, then of each kind what the others did together."""
    others: dict[str, Tally] = {}
    for number, (entry, tally) in enumerate(entries.items()):
        if number < most:
            yield (entry.kind, bucket_of(entry)), tally
        else:
            others[entry.kind] = others.get(entry.kind, Tally()) + tally
    for kind, tally in others.items():
        yield (kind, OTHER), tally


def entry_families(snapshot: TalliesSnapshot, most: int = MAX_BUCKETS) -> Iterator[Metric]:
    """Yields what is exported of each entry. What an entry never did has no sample: decodes have no queue."""
    rows = list(labelled(snapshot.entries, most))
    for name, (text, of) in _TOTALS.items():
        yield _summary(name, text, [(labels, of(tally)) for labels, tally in rows])
    yield from _work_families("entry_", _LABELS, {(*labels,): tally for labels, tally in rows})
    prefixes = CounterMetricFamily(
        "aotgaudi_entry_prefix_tokens",
        "Prompt tokens of requests whose first chunk an entry computed: found in the prefix cache, or not.",
        labels=[*_LABELS, "found"],
    )
    for labels, tally in rows:
        if tally.num_prefix_tokens:
            num_missed = tally.num_prefix_tokens - tally.num_cached_tokens
            prefixes.add_metric([*labels, "cached"], tally.num_cached_tokens)
            prefixes.add_metric([*labels, "computed"], num_missed)
    yield prefixes


def kind_families(snapshot: TalliesSnapshot) -> Iterator[Metric]:
    """Yields what the entries of a kind have done together, and the time between tokens of all requests."""
    rows: dict[tuple[str, ...], Tally] = {(kind,): tally for kind, tally in snapshot.by_kind().items()}
    yield from _work_families("step_", ("kind",), rows)
    yield HistogramMetricFamily(
        "aotgaudi_inter_token_latency_seconds",
        "Time between two tokens of a request, when they were sampled.",
        buckets=_cumulated(snapshot.gap_counts),
        sum_value=snapshot.gap_seconds,
    )


def _summary(name: str, text: str, rows: list[tuple[tuple[str, str], Total]]) -> Metric:
    family = SummaryMetricFamily(name, text, labels=_LABELS)
    for labels, total in rows:
        if total.num:
            family.add_metric(labels, total.num, total.seconds)
    return family


def _work_families(
    infix: str, names: Sequence[str], rows: Mapping[tuple[str, ...], Tally]
) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        f"aotgaudi_{infix}tokens",
        "Tokens that steps computed, needed and padding.",
        labels=[*names, "work"],
    )
    blocks = CounterMetricFamily(
        f"aotgaudi_{infix}blocks",
        "KV blocks that steps read, needed and padding.",
        labels=[*names, "work"],
    )
    for labels, tally in rows.items():
        work = tally.work
        if labels[0] == "defrag":
            continue  # It computes no tokens, and moves blocks without reading them.
        tokens.add_metric([*labels, "needed"], work.num_tokens)
        tokens.add_metric([*labels, "padding"], work.num_padding_tokens)
        blocks.add_metric([*labels, "needed"], work.num_blocks)
        blocks.add_metric([*labels, "padding"], work.num_padding_blocks)
    yield tokens
    yield blocks


def _cumulated(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*map(str, GAP_BOUNDS), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
