from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as PrometheusHistogram

from aotgaudi.errors import SpecError
from aotgaudi.traffic.trace import MOST_DRAWN, Drawing, Histogram, read_trace

BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
DRAWING = Drawing(requests_per_second=5.0, max_model_len=16_384)


def exposition(prompts: list[int], answers: list[int], prefix: str = "vllm:") -> str:
    """What a server's /metrics has after these requests, half of them on another engine."""
    registry = CollectorRegistry()
    for name, sizes in (("prompt", prompts), ("generation", answers)):
        histogram = PrometheusHistogram(
            f"{prefix}request_{name}_tokens", "Tokens.", ["engine"], buckets=BOUNDS, registry=registry
        )
        for index, size in enumerate(sizes):
            histogram.labels(str(index % 2)).observe(size)
    return generate_latest(registry).decode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.txt"


@pytest.mark.parametrize("prefix", ["vllm:", "aotgaudi_"])
def test_as_many_requests_are_drawn_of_each_bucket_as_were_counted(path: Path, prefix: str) -> None:
    prompts, answers = [3, 3, 7, 150, 150, 4000, 12_000], [1, 2, 30, 30, 80, 400, 400]
    path.write_text(exposition(prompts, answers, prefix))

    trace = read_trace(path, DRAWING)

    def buckets(sizes: list[int]) -> list[int]:
        return [sum(size <= bound for size in sizes) for bound in BOUNDS]

    assert len(trace) == 7
    assert buckets(list(trace.prompt_tokens)) == buckets(prompts)
    assert buckets(list(trace.generated_tokens)) == buckets(answers)
    assert max(trace.prompt_tokens) < DRAWING.max_model_len


def test_a_server_that_has_them_under_two_names_is_counted_once(path: Path) -> None:
    both = exposition([3, 2, 1], [1, 1, 1]) + exposition([3, 2, 1], [1, 1, 1], "aotgaudi_")
    path.write_text(exposition([3, 2, 1], [1, 1, 1]), encoding="utf-8")
    once = read_trace(path, DRAWING)

    path.write_text(both, encoding="utf-8")

    assert read_trace(path, DRAWING) == once


def test_a_server_that_has_the_histograms_under_two_names_has_counted_once(path: Path) -> None:
    path.write_text(exposition([100] * 5, [20] * 5) + exposition([100] * 5, [20] * 5, "aotgaudi_"))

    assert len(read_trace(path, DRAWING)) == 5


def test_the_same_text_gives_the_same_trace(path: Path) -> None:
    path.write_text(exposition([100] * 50, [20] * 50))

    assert read_trace(path, DRAWING) == read_trace(path, DRAWING)


def test_arrivals_have_the_rate_that_was_given(path: Path) -> None:
    path.write_text(exposition([100] * 30_000, [20] * 30_000))

    trace = read_trace(path, DRAWING)

    assert len(trace) == MOST_DRAWN
    assert trace.seconds == pytest.approx(MOST_DRAWN / 5, rel=0.01)


def test_without_a_rate_nothing_is_drawn(path: Path) -> None:
    path.write_text(exposition([1], [1]))

    with pytest.raises(SpecError, match=r"do not say when requests came .*--requests-per-second"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# HELP x y\nx 1\n", "no histogram of the tokens of prompts"),
        (exposition([], []), "no histogram of the tokens of prompts"),
        (exposition([5], [])[:-1], "no histogram of the tokens of answers"),
        ("# HELP x y\nvllm:request_prompt_tokens_bucket{le=\n", "not what /metrics answers"),
        (
            '# HELP x y\nvllm:request_prompt_tokens_bucket{le="1"} 5\nvllm:request_prompt_tokens_bucket{le="+Inf"} 4\n',
            "do not ascend",
        ),
        ('# HELP x y\nvllm:request_prompt_tokens_bucket{le="+Inf"} NaN\n', "do not ascend"),
        ('# HELP x y\nvllm:request_prompt_tokens_bucket{le="+Inf"} 0\n', "has counted nothing"),
    ],
)
def test_a_text_without_these_histograms_is_refused_in_one_line(path: Path, text: str, problem: str) -> None:
    path.write_text(text)

    with pytest.raises(SpecError, match=problem) as caught:
        read_trace(path, DRAWING)

    assert "\n" not in str(caught.value)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.integers(1, 200))
def test_sizes_ascend_and_each_lies_in_its_bucket(shares: list[int], num: int) -> None:
    shares[-1] += 1
    bounds = (*(10.0 * 2**index for index in range(len(shares) - 1)), math.inf)
    counts = tuple(sum(shares[: index + 1]) for index in range(len(shares)))

    sizes = Histogram(bounds, counts).sizes(num, 100_000)

    assert sizes == sorted(sizes)
    for index, size in enumerate(sizes):
        bucket = next(i for i, count in enumerate(counts) if count * 2 * num >= (2 * index + 1) * counts[-1])
        assert (bounds[bucket - 1] if bucket else 0) < size <= min(bounds[bucket], 100_000)
