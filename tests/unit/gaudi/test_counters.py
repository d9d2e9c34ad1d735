"""Both styles of the bridge's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from aotgaudi.errors import TargetError
from aotgaudi.gaudi.counters import Counters, Counts, require_found


class OldMetric:
    def __init__(self, stats: dict[str, Any]) -> None:
        self.now, self.is_stopped = stats, False

    def stats(self) -> list[tuple[str, Any]]:
        return list(self.now.items())

    def stop(self) -> None:
        self.is_stopped = True


class NewMetric(OldMetric):
    """Counts what is queued only when it is asked to."""

    def __init__(self, stats: dict[str, Any]) -> None:
        super().__init__({})
        self._queued = stats

    def process(self) -> None:
        self.now = self._queued


class Metrics:
    def __init__(self, **metrics: OldMetric) -> None:
        self._metrics = metrics

    def metric_global(self, name: str) -> OldMetric | None:
        return self._metrics.get(name)


@pytest.mark.parametrize("style", [OldMetric, NewMetric])
def test_both_styles_say_the_same(style: type[OldMetric]) -> None:
    counters = Counters(
        Metrics(
            graph_compilation=style({"TotalNumber": 2, "TotalTime": 700, "AvgTime": 350}),
            recipe_cache=style({"TotalHit": 3, "RecipeHit": {"7": 3}, "TotalMiss": 1, "RecipeMiss": {-1: 1}}),
            cpu_fallback=style({"TotalNumber": 1, "FallbackOps": {"aten::index": 1}}),
        ),
        lambda: 5,
    )

    assert counters.knows_recipes
    assert counters.read() == Counts(2, {"7": 3}, {str(2**64 - 1): 1}, 1, 5)


def test_a_difference_tells_the_recipes_of_what_ran_in_between() -> None:
    before = Counts(compiled=1, hits={"1": 1, "2": 1})
    after = Counts(compiled=3, hits={"1": 1, "2": 4}, misses={"3": 1})

    delta = after.since(before)

    assert delta == Counts(compiled=2, hits={"2": 3}, misses={"3": 1})
    assert delta.recipes == {"2", "3"}


def test_without_the_count_of_recipes_compilations_are_still_counted() -> None:
    counters = Counters(Metrics(graph_compilation=OldMetric({"TotalNumber": 4})))

    assert not counters.knows_recipes
    assert counters.read() == Counts(compiled=4)


def test_without_the_count_of_compilations_nothing_can_be_proved() -> None:
    with pytest.raises(TargetError, match="graph_compilation"):
        Counters(Metrics())


@pytest.mark.parametrize(
    "counts",
    [
        Counts(hits={"1": 2, "2": 1}),
        Counts(hits={"1": 1, "2": 1, "9": 4}),
        Counts(hits={"1": 1, "2": 1}, misses={"7": 1}, compiled=1),
        Counts(hits={"1": 1, "2": 1}, misses={"7": 2}, compiled=2),
    ],
)
def test_a_unit_that_found_its_recipes_is_warm(counts: Counts) -> None:
    require_found("layer", ("1", "2"), counts, uncached=("7",))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            Counts(hits={"1": 1}, misses={"5": 1}, compiled=1),
            "recipe 2 of layer was not found .* looked for 5",
        ),
        (Counts(), "recipe 1 of layer was not found .* looked for none"),
        (Counts(hits={"1": 1, "2": 1}, misses={"5": 1}), "layer needed recipe 5, which was not sealed"),
        (Counts(hits={"1": 1, "2": 1}, compiled=1), "layer compiled 1 graphs, but the bridge missed 0"),
    ],
)
def test_a_unit_that_did_not_is_refused_by_the_recipes_key(counts: Counts, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        require_found("layer", ("1", "2"), counts, uncached=("7",))
