"""Traces: what is read from files of every kind, and what is none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.traffic import trace as reading
from aotgaudi.traffic.trace import Trace, read_trace

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


def problem_of(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_trace(path)
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
        (f"\n \n{HEADER}0,5\n", ", line 4: has 2 of 3 columns"),
        ('{"time": 0, "prompt_tokens": 5}\n', ", line 1: has no generated tokens among its keys"),
        ('{"time": 0, "prompt_tokens": true, "generated_tokens": 1}\n', ", line 1: has true prompt tokens"),
        ('{"time": 0, "prompt_tokens": 1, "generated_tokens": NaN}\n', ", line 1: has NaN generated tokens"),
        ('{"time": 0,\n', ", line 1: is not JSON"),
        ('{"time": 0, "prompt_tokens": 1, "generated_tokens": 1}\n[]\n', ", line 2: is no JSON object"),
    ],
)
def test_a_bad_trace_gets_one_line_that_says_where(write: Write, text: str, problem: str) -> None:
    assert problem_of(write(text)).startswith(problem)


def test_a_faster_trace_has_finite_times() -> None:
    trace = Trace((0.0, 2.0), (1, 1), (1, 1))

    assert trace.faster(4).arrivals == (0.0, 0.5)
    with pytest.raises(SpecError, match="not finite"):
        trace.faster(5e-324)


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

    assert read_trace(write(AZURE)) == EXPECTED
    problem = problem_of(write(AZURE + "2023-11-16 18:17:50,1,1\n"))
    assert problem == ", line 5: is request 4 (at most 3: a part of it)"
