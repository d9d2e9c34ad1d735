"""``aotgaudi report --trace``: which traces it takes, and what it says where one cannot be replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import Command
from tests.specs import spec_toml

run = Command("report")

CONFIG = """config = { model_type = "llama", max_position_embeddings = 512, hidden_size = 64, intermediate_size = 128, \
num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 256 }"""
CSV = "time,prompt_tokens,generated_tokens\n0,17,3\n0.5,90,9\n2,300,9\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTGAUDI_STORE", str(tmp_path / "no store"))
    text = spec_toml()
    line = next(line for line in text.splitlines() if line.startswith("config = "))
    Path("x.toml").write_text(text.replace(line, CONFIG))
    Path("x.csv").write_text(CSV)


def test_a_trace_is_replayed() -> None:
    found = run.document("x.toml", "--trace", "x.csv")["trace"]

    assert (found["path"], found["num_requests"], found["num_refused"]) == ("x.csv", 2, 1)
    assert found["factor"] > 1
    assert found["basis"].startswith("assumed")


def test_a_manifest_with_a_hole_is_reported_without_the_trace_that_meets_it() -> None:
    rest = '[bucketing]\ncoverage = "upstream"\nstrategy = "linear"\n[bucketing.decode]\nnum_blocks = { max = 2 }\n'
    Path("y.toml").write_text(Path("x.toml").read_text() + rest)

    found = run.document("y.toml", "--trace", "x.csv")

    assert found["num_holes"] > 0
    assert found["trace"] is None
    assert any(
        note.startswith("the trace was not replayed: a step of it, (decode") for note in found["notes"]
    )
