from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.traffic.step_times import read_step_times

PROMPTS = [PromptEntry(1, query, ctx) for query in (16, 32, 64) for ctx in (0, 4, 9)]
DECODES = [DecodeEntry(batch, 1, blocks) for batch in (1, 2, 8) for blocks in (8, 20, 50)]


def written(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(value))
    return path


def prompt_seconds(entry: PromptEntry) -> float:
    tokens, keys = entry.query_len, 16 * entry.num_ctx_blocks
    return (5_000_000 + 40_000 * tokens + 30 * tokens * (tokens + keys) + 700 * keys) / 1e9


def decode_seconds(entry: DecodeEntry) -> float:
    return (9_000_000 + 300_000 * entry.batch_size + 900 * 16 * entry.num_blocks) / 1e9


def test_terms_that_made_the_times_are_found_again(tmp_path: Path) -> None:
    times = {str(entry): prompt_seconds(entry) for entry in PROMPTS}
    times |= {f"(decode, {one.batch_size}, 1, {one.num_blocks})": decode_seconds(one) for one in DECODES}

    work = read_step_times(written(tmp_path, times)).work(16)

    for prompt in (*PROMPTS, PromptEntry(1, 48, 7)):
        assert work.seconds(prompt) == pytest.approx(prompt_seconds(prompt), rel=1e-5)
    for decode in (*DECODES, DecodeEntry(4, 1, 33)):
        assert work.seconds(decode) == pytest.approx(decode_seconds(decode), rel=1e-5)


def test_a_term_never_counts_for_less_than_nothing(tmp_path: Path) -> None:
    times = {"(prompt, 1, 16, 0)": 0.5, "(prompt, 1, 32, 0)": 0.4, "(prompt, 1, 64, 0)": 0.3}
    times |= {"(decode, 1, 1, 1)": 0.2, "(decode, 2, 1, 9)": 0.1}

    work = read_step_times(written(tmp_path, times)).work(16)

    sizes = [work.prompt_work(query, 0) for query in (16, 32, 64, 128)]
    assert sizes == sorted(sizes)
    assert sizes[0] > 0
    assert work.decode_work(1, 1) <= work.decode_work(9, 2)


def test_one_time_of_each_kind_is_enough(tmp_path: Path) -> None:
    times = {"(prompt, 1, 16, 0)": 0.016, "(decode, 1, 1, 1)": 0.02}

    work = read_step_times(written(tmp_path, times)).work(16)

    assert work.seconds(PromptEntry(1, 16, 0)) == pytest.approx(0.016)
    assert work.seconds(DecodeEntry(1, 1, 1)) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "has no entries"),
        ({}, "has no times of prompt entries"),
        ({"(prompt, 1, 16, 0)": 0.1}, "has no times of decode entries"),
        ({"(prompt, 1, 16)": 0.1}, r"has '\(prompt, 1, 16\)'"),
        ({"(prompt, 1, 16, 0)": 0}, r"has '\(prompt, 1, 16, 0\)': 0"),
        ({"(prompt, 1, 16, 0)": -1}, ": -1"),
        ({"(prompt, 1, 16, 0)": float("nan")}, ": NaN"),
        ({"(prompt, 1, 16, 0)": "fast"}, ': "fast"'),
        ({"(prompt, 1, 16, 0)": {"mean": 1}}, ": null"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_line(tmp_path: Path, value: Any, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        read_step_times(written(tmp_path, value)).work(16)

    assert "\n" not in str(caught.value)
