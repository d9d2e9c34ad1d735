"""What ``aotgaudi tune`` prints: its JSON document as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def tuned_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines."""
    yield (
        f"{document['requests']:,} requests, {document['steps']:,} steps in {document['seconds']:,.0f} s of simulated time"
        f" ({document['refused']:,} requests do not fit the limits, {document['shortened']:,} answers are cut)"
    )
    if document["scheduler"] != "aotgaudi":
        yield "the steps are those that our scheduler forms; a vLLM server cuts prompts otherwise beside decodes"
    if document["step_times"] is not None:
        yield from _step_time_lines(document["step_times"])
    for budget in document["budgets"]:
        yield (
            f"{budget['name']} {budget['most']:,.6g}: {budget['takes']:,.6g} by {budget['prompt']:,.6g} a prompt entry and"
            f" {budget['decode']:,.6g} a decode entry ({budget['source']})"
        )
    yield (
        f"tuned: {document['prompts']} prompt and {document['decodes']} decode entries, closed; at most"
        f" {100 * document['gap']:.2f} % more work than {document['gap_covers']}"
    )
    yield f"  not compared with: {'; '.join(document['gap_leaves_out'])}"
    yield f"  {'':<28}{'entries':>8}{'work, ' + document['unit']:>14}{'of it padding':>15}{'beside tuned':>14}"
    for one in (document["tuned"], *document["strategies"], *document["nearest"]):
        yield _line(one, document["tuned"])
    yield "the same trace, replayed in the tuned buckets:"
    yield _line(document["replayed"], document["tuned"])


def _step_time_lines(times: Mapping[str, Any]) -> Iterator[str]:
    steps = "" if times["steps"] is None else f" in {times['steps']:,} steps"
    yield (
        f"step times: {times['entries']} entries measured{steps}; of today's {times['today']} entries {times['of_today']}"
        f" are among them, and {times['today'] - times['of_today']} are not"
    )
    yield (
        "  all work is by a fit to these, of entries that were not measured as well; it misses the measured times by"
        f" {100 * times['median_miss']:.1f} % in the median, by {100 * times['largest_miss']:.1f} % at most"
    )


def _line(one: Mapping[str, Any], tuned: Mapping[str, Any]) -> str:
    beside = 100 * (one["work"] / tuned["work"] - 1)
    return f"  {one['name']:<28}{one['num_entries']:>8,}{one['work']:>14.4g}{100 * one['share']:>13.1f} %{beside:>+12.1f} %"
