"""``aotgaudi tune``: the specs and files that it writes; what it prints is in tests/transcripts/tune.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aotgaudi.bucketing.bucket_file import LITERAL, read_bucket_file
from aotgaudi.cli.main import cli
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec, write_spec
from tests.specs import spec_of

CONFIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip
TRACE = "time,prompt_tokens,generated_tokens\n" + "".join(
    f"{second / 10},{1 + second * 37 % 90},{1 + second * 11 % 30}\n" for second in range(60)
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "chat.toml"
    write_spec(path, spec_of(config=CONFIG, limits={"max_num_seqs": 8, "num_blocks": 40}))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["tune", *map(str, arguments)])


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_the_spec_that_is_written_is_closed_and_within_the_budget(
    spec: Path, trace: Path, tmp_path: Path
) -> None:
    output = tmp_path / "tuned.toml"

    found = document(tune(trace, "--from", spec, "--entries", 12, "-o", output, "--json"))

    tuned = load_spec(output)
    manifest = Manifest.of(tuned)
    assert tuned.bucketing.strategy == "tuned"
    assert tuned.limits == load_spec(spec).limits
    assert coverage_of(manifest).is_closed
    assert found["prompts"] == len(manifest.of_kind("prompt"))
    assert found["decodes"] == len(manifest.of_kind("decode"))
    assert found["prompts"] + found["decodes"] == found["tuned"]["num_entries"] <= 12


def test_the_bucket_file_has_the_tuned_buckets(spec: Path, trace: Path, tmp_path: Path) -> None:
    output, buckets = tmp_path / "tuned.toml", tmp_path / "buckets.txt"

    document(tune(trace, "--from", spec, "--entries", 12, "-o", output, "--bucket-file", buckets, "--json"))

    tuned = load_spec(output).bucketing.tuned
    assert tuned is not None
    listed = read_bucket_file(buckets.read_text(), LITERAL)
    assert {(batch, 1, blocks) for batch, blocks in tuned.decodes} <= set(listed.decode)


def test_a_vllm_server_gets_a_spec_that_reads_a_file(trace: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "server.toml", tmp_path / "tuned.toml"
    write_spec(path, spec_of(config=CONFIG, scheduler={"engine": "vllm"}))

    result = tune(trace, "--from", path, "-o", output)

    assert result.exit_code == 0, result.output
    assert "a vLLM server cuts prompts otherwise" in result.stdout
    tuned = load_spec(output)
    assert (tuned.bucketing.strategy, tuned.scheduler.engine) == ("file", "vllm")
    assert coverage_of(Manifest.of(tuned)).is_closed


def test_a_faster_trace_runs_more_at_once(spec: Path, trace: Path) -> None:
    slow, fast = (document(tune(trace, "--from", spec, "--load", load, "--json")) for load in (0.01, 1e6))

    assert fast["steps"] < slow["steps"]
    assert fast["seconds"] < slow["seconds"]
