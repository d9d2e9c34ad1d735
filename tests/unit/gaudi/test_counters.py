"""Both styles of the bridge's metrics, and the files that they are written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.errors import StoreError, TargetError
from aotgaudi.gaudi.counters import Counters, Counts, require_found
from aotgaudi.gaudi.metric_file import metric_files, read_metric_file


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
    assert counters.read() == Counts(2, 700, {"7": 3}, {str(2**64 - 1): 1}, 1, 5)


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
    counters.stop_telling_recipes()


def test_without_the_count_of_compilations_nothing_can_be_proved() -> None:
    with pytest.raises(TargetError, match="graph_compilation"):
        Counters(Metrics())


def test_the_counting_of_recipes_ends() -> None:
    recipes = OldMetric({})
    Counters(Metrics(graph_compilation=OldMetric({}), recipe_cache=recipes)).stop_telling_recipes()

    assert recipes.is_stopped


def record(name: str, **statistics: object) -> dict[str, object]:
    return {
        "metric_name": name,
        "triggered_by": "process_exit",
        "generated_on": "x",
        "statistics": statistics,
    }


def test_the_last_record_of_a_file_has_the_totals(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    records = [
        record("graph_compilation", TotalNumber=1, TotalTime=10),
        record("recipe_cache", RecipeHit={"5": 1}, RecipeMiss={}),
        record("graph_compilation", TotalNumber=2, TotalTime=20),
    ]
    path.write_text(json.dumps(records), encoding="utf-8")

    assert read_metric_file(path) == Counts(compiled=2, compile_microseconds=20, hits={"5": 1})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '[{"metric_name": "cpu_fallback"}]',
        "[[[[",
        json.dumps([record("cpu_fallback")]),
        "[" * 10**5,
    ],
)
def test_a_file_that_says_nothing_is_not_taken_for_none_compiled(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(StoreError, match=r"metrics\.json"):
        read_metric_file(path)


def test_the_files_of_all_ranks_and_processes_are_found(tmp_path: Path) -> None:
    names = ["m.json", "m-rank0.json", "m-rank1.json", "m.json.1", "other.json", "m.txt", "mm.json"]
    for name in names:
        (tmp_path / name).write_text("[]", encoding="utf-8")

    assert {path.name for path in metric_files(tmp_path / "m.json")} == set(names[:4])
    assert metric_files(tmp_path / "nowhere" / "m.json") == ()


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
