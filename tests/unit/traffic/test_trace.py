"""Traces: what is none, what is read from files of every kind, and what is drawn from histograms."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as PrometheusHistogram

from aotgaudi.errors import SpecError
from aotgaudi.traffic import trace as reading
from aotgaudi.traffic.trace import MOST_DRAWN, Drawing, Histogram, Trace, read_trace

TRACE = Trace((0.0, 1.0, 1.0, 5.0, 6.0), (1, 2, 3, 4, 5), (10, 20, 30, 40, 0))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (((), (), ()), "has no requests"),
        (((0.0,), (1, 2), (1,)), "different lengths"),
        (((float("nan"),), (1,), (1,)), "not finite"),
        (((1.0, 0.0), (1, 1), (1, 1)), "out of order"),
        (((0.0,), (0,), (1,)), "without tokens"),
        (((0.0,), (1,), (-1,)), "negative"),
    ],
)
def test_a_value_that_is_no_trace_cannot_be_made(columns: tuple[Any, Any, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        Trace(*columns)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:50.9951690,879,0
"""
EXPECTED = Trace((0.0, 4.314579, 64.314579), (374, 396, 879), (44, 109, 0))

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def problem_of(path: Path, drawing: Drawing | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        read_trace(path, drawing)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_an_azure_trace_is_read_as_it_is_published(write: Write) -> None:
    assert read_trace(write(AZURE)) == EXPECTED


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))

    assert read_trace(path) == EXPECTED


def test_columns_may_have_plain_names_in_any_order_beside_others(write: Write) -> None:
    text = (
        "user,Output tokens,prompt_tokens,time\na,44,374,100\nb,109,396,104.314579\n\nc,0,879.0,164.314579\n"
    )

    trace = read_trace(write(text))

    assert trace.prompt_tokens == EXPECTED.prompt_tokens
    assert trace.generated_tokens == EXPECTED.generated_tokens
    assert trace.arrivals == pytest.approx(EXPECTED.arrivals)


def test_dates_may_have_offsets_and_cross_years(write: Write) -> None:
    rows = ["2023-12-31T23:59:59Z", "2024-01-01 01:00:00.5+01:00", "2023-12-31 23:00:01-0100"]
    text = "time,prompt_tokens,generated_tokens\n" + "".join(f"{row},1,1\n" for row in rows)

    assert read_trace(write(text)).arrivals == (0, 1.5, 2)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1)), min_size=1
    )
)
def test_csv_and_jsonl_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]
) -> None:
    rows.sort(key=lambda row: row[0])
    names = ("arrival", "input_tokens", "completion_tokens")
    folder = tmp_path_factory.mktemp("traces")
    as_csv, as_json = folder / "csv", folder / "json"
    as_csv.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]))
    as_json.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))

    trace = read_trace(as_csv)

    assert trace == read_trace(as_json)
    assert list(zip(trace.arrivals, trace.prompt_tokens, trace.generated_tokens, strict=True)) == [
        (time - rows[0][0], prompt, generated) for time, prompt, generated in rows
    ]


def logged(arrived: str | None, **fields: object) -> str:
    line = {"time": "2026-11-22T20:00:00.000Z", "level": "INFO", "logger": "aotgaudi.access", "message": "x"}
    return json.dumps({**line, "request_id": None, **({"arrived": arrived} if arrived else {}), **fields})


def test_the_log_of_our_server_is_a_trace_in_the_order_of_arrival(write: Write) -> None:
    lines = [
        logged(None),
        logged("2026-11-22T20:00:03.500+00:00", prompt_tokens=7, generated_tokens=2),
        logged("2026-11-22T20:00:01.000+00:00", prompt_tokens=5, generated_tokens=90),
        "3 lines were dropped: nobody read this log",
        logged("2026-11-22T20:00:04.000+00:00", status=404),
    ]

    assert read_trace(write("\n".join(lines))) == Trace((0.0, 2.5), (5, 7), (90, 2))


def test_a_log_without_requests_is_refused(write: Write) -> None:
    assert problem_of(write(logged(None))) == ": has no requests (a request a line)"


HEADER = "time,prompt_tokens,generated_tokens\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ": is empty"),
        ("\n \n", ": is empty"),
        (HEADER, ": has no requests"),
        ("time\n1\n", ", line 1: has no prompt tokens among its columns 'time'"),
        ("1,2,3\n", ", line 1: has no time among its columns '1', '2', '3'"),
        ("time,ts,prompt_tokens,generated_tokens\n", ", line 1: has more than one time"),
        (f"{HEADER}0,5,5\n1,-5,5\n", ", line 3: has '-5' prompt tokens (a whole number from 1 to"),
        (f"{HEADER}0,5,-1\n", ", line 2: has '-1' generated tokens (a whole number from 0 to"),
        (f"{HEADER}0,0,5\n", ", line 2: has '0' prompt tokens"),
        (f"{HEADER}0,NaN,5\n", ", line 2: has 'NaN' prompt tokens"),
        (f"{HEADER}0,inf,5\n", ", line 2: has 'inf' prompt tokens"),
        (f"{HEADER}0,2.5,5\n", ", line 2: has '2.5' prompt tokens"),
        (f"{HEADER}0,1e99,5\n", ", line 2: has '1e99' prompt tokens"),
        (f"{HEADER}0,many,5\n", ", line 2: has 'many' prompt tokens"),
        (f"{HEADER}NaN,5,5\n", ", line 2: has the time 'NaN' (seconds, or a date with a time)"),
        (f"{HEADER}2023-13-01 00:00:00,5,5\n", ", line 2: has the time '2023-13-01 00:00:00'"),
        (f"{HEADER}0,5,5\n2023-12-01 00:00:00,5,5\n", ", line 3: has the time '2023-12-01 00:00:00' (as in"),
        (f"{HEADER}2,5,5\n1,5,5\n", ", line 3: has a time before that of the request before it (sort it"),
        (f"{HEADER}0,5,5\n0,5\n", ", line 3: has 2 of 3 columns"),
        ('{"time": 0, "prompt_tokens": 5}\n', ", line 1: has no generated tokens among its keys"),
        ('{"time": 0, "prompt_tokens": true, "generated_tokens": 1}\n', ", line 1: has true prompt tokens"),
        ('{"time": 0, "prompt_tokens": 1, "generated_tokens": NaN}\n', ", line 1: has NaN generated tokens"),
        ('{"time": 0,\n', ", line 1: is not JSON"),
        ('{"time": 0, "prompt_tokens": 1, "generated_tokens": 1}\n[]\n', ", line 2: is no JSON object"),
    ],
)
def test_a_bad_trace_gets_one_line_that_says_where(write: Write, text: str, problem: str) -> None:
    assert problem_of(write(text)).startswith(problem)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert problem_of(tmp_path / "none.csv") == ": is not there (a trace)"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xff\xfe\x00", ": is not UTF-8 text"),
        (gzip.compress(AZURE.encode())[:-20], ": cannot be unpacked"),
        (gzip.compress(b"a" * (1 << 26)), ", line 1: is too long"),
    ],
    ids=["no text", "a torn gzip file", "a line without an end"],
)
def test_bytes_that_are_no_text_of_lines_are_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)

    assert problem_of(path).startswith(problem)


def test_a_trace_is_read_as_far_as_it_may_be_long(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_REQUESTS", 3)

    assert len(read_trace(write(AZURE))) == 3
    problem = problem_of(write(AZURE + "2023-11-16 18:17:50,1,1\n"))
    assert problem == ", line 5: is request 4 (at most 3: a part of it)"


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


def test_the_same_text_gives_the_same_trace(path: Path) -> None:
    path.write_text(exposition([100] * 50, [20] * 50))

    assert read_trace(path, DRAWING) == read_trace(path, DRAWING)


def test_arrivals_have_the_rate_that_was_given(path: Path) -> None:
    path.write_text(exposition([100] * 30_000, [20] * 30_000))

    trace = read_trace(path, DRAWING)

    assert len(trace) == MOST_DRAWN
    assert trace.arrivals[-1] == pytest.approx(MOST_DRAWN / 5, rel=0.01)


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
