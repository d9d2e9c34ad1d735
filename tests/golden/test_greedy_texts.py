"""Greedy texts of DeepSeek V3 and V4, by traced programs, against those that transformers generated."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import pytest

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, PromptEntry
from tests.golden.rows import GOLDENS, OURS, Row, read_rows
from tests.integration.models import BLOCK_SIZE, random_model
from tests.unit.graphs.test_trace import eager_runner

pytestmark = pytest.mark.slow

SERVED = ("deepseek_v2", "deepseek_v3", "deepseek_v4", "glm4_moe_lite")
CHUNK, DECODE = PromptEntry(1, 32, 8), DecodeEntry(1, 1, 10)
FIRST_BLOCK = 3
DAILY = ("deepseek_v3", "all-kinds", "ties", "real-ratios")
"""Models or cases of our own rows that every run checks; the others repeat them. Rows of another folder are all checked."""


def cases() -> dict[str, list[Row]]:
    """The rows of each model's cases."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in read_rows("dsv4/visible.jsonl.gz"):
        if row["model"] in SERVED:
            found[f"{row['model']} {row['case']}"].append(row)
    return found


CASES = cases()


def marked(name: str) -> Any:
    is_daily = GOLDENS != OURS or any(part in DAILY for part in name.split())
    return pytest.param(name, marks=() if is_daily else pytest.mark.nightly)


def digest_of(model: Any) -> str:
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def block_size_of(config: dict[str, Any]) -> int:
    """Our blocks of 16 tokens, or as long as the longest window that a layer compresses."""
    return max(BLOCK_SIZE, *(config.get("compress_rates") or {"": 1}).values())


def text_of(runner: ProgramRunner, block_size: int, prompt: list[int], num_tokens: int) -> list[int]:
    """Prefills in chunks of 32 tokens, then decodes; returns the likeliest tokens."""
    table = tuple(range(FIRST_BLOCK, FIRST_BLOCK + -(-(len(prompt) + num_tokens) // block_size)))
    for start in range(0, len(prompt), 32):
        row = PromptRow(tuple(prompt[start : start + 32]), start, table, None)
        logits = runner.logits(PromptStep(CHUNK, (row,)))
    tokens = [int(logits[0].argmax())]
    while len(tokens) < num_tokens:
        position = len(prompt) + len(tokens) - 1
        row = DecodeRow(tokens[-1], position, table, SamplingRow())
        tokens.append(int(runner.logits(DecodeStep(DECODE, (row,)))[0].argmax()))
    return tokens


@pytest.mark.skipif(not CASES, reason="the goldens have no rows of these models")
@pytest.mark.parametrize("name", map(marked, CASES))
def test_texts_equal_those_of_transformers(name: str) -> None:
    runners: dict[tuple[str, str], ProgramRunner] = {}
    for row in CASES[name]:
        key = json.dumps(row["config"], sort_keys=True), row["weights_sha256"]
        block_size = block_size_of(row["config"])
        if key not in runners:
            model = random_model(row["config"], row["seed"])
            assert digest_of(model) == row["weights_sha256"]
            runners[key] = eager_runner(model, (CHUNK, DECODE), block_size=block_size)

        assert text_of(runners[key], block_size, row["prompt"], len(row["tokens"])) == row["tokens"], len(
            row["prompt"]
        )
