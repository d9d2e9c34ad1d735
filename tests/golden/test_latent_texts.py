"""Greedy texts of models with latent attention, by traced programs, against those that transformers generated."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import pytest

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, PromptEntry
from tests.golden.rows import Row, read_rows
from tests.integration.models import BLOCK_SIZE, random_model
from tests.unit.graphs.test_trace import eager_runner

SERVED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
FRESH, CHUNK, DECODE = PromptEntry(1, 32, 0), PromptEntry(1, 32, 8), DecodeEntry(1, 1, 10)
FIRST_BLOCK = 3


def models() -> dict[str, list[Row]]:
    """The rows of each model, named by case and seed."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in read_rows("dsv4/visible.jsonl.gz"):
        if row["model"] in SERVED:
            found[f"{row['model']} {row['case']} {row['seed']}"].append(row)
    return found


MODELS = models()


def digest_of(model: Any) -> str:
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def text_of(runner: ProgramRunner, prompt: list[int], num_tokens: int) -> list[int]:
    """Prefills in chunks of 32 tokens, then decodes; returns the likeliest tokens."""
    table = tuple(range(FIRST_BLOCK, FIRST_BLOCK + -(-(len(prompt) + num_tokens) // BLOCK_SIZE)))
    for start in range(0, len(prompt), 32):
        row = PromptRow(tuple(prompt[start : start + 32]), start, table, None)
        logits = runner.logits(PromptStep(CHUNK if start else FRESH, (row,)))
    tokens = [int(logits[0].argmax())]
    while len(tokens) < num_tokens:
        position = len(prompt) + len(tokens) - 1
        row = DecodeRow(tokens[-1], position, table, SamplingRow())
        tokens.append(int(runner.logits(DecodeStep(DECODE, (row,)))[0].argmax()))
    return tokens


@pytest.mark.skipif(not MODELS, reason="the goldens have no rows of these models")
@pytest.mark.parametrize("name", MODELS)
def test_texts_equal_those_of_transformers(name: str) -> None:
    rows = MODELS[name]
    model = random_model(rows[0]["config"], rows[0]["seed"])
    assert digest_of(model) == rows[0]["weights_sha256"]
    runner = eager_runner(model, (FRESH, CHUNK, DECODE))

    for row in rows:
        assert json.dumps(row["config"], sort_keys=True) == json.dumps(rows[0]["config"], sort_keys=True)
        assert text_of(runner, row["prompt"], len(row["tokens"])) == row["tokens"], len(row["prompt"])
