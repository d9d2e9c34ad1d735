from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from aotgaudi.engine.stats import GAP_BOUNDS, CounterSnapshot, EntryCounters, Total
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.server.metrics import entry_families
from aotgaudi.spec.parse import load_spec
from aotgaudi.traffic.cost import DEVICES, WorkModel, read_step_times
from tests.specs import spec_of

MANIFESTS = Path(__file__).parents[3] / "manifests"

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


METRICS = """# HELP aotgaudi_entry_step_seconds Steps of an entry, and their seconds.
# TYPE aotgaudi_entry_step_seconds summary
aotgaudi_entry_step_seconds_count{bucket="1,16,0",kind="prompt"} 4.0
aotgaudi_entry_step_seconds_sum{bucket="1,16,0",kind="prompt"} 0.064
aotgaudi_entry_step_seconds_count{bucket="1,32,0",kind="prompt"} 1.0
aotgaudi_entry_step_seconds_sum{bucket="1,32,0",kind="prompt"} 0.032
aotgaudi_entry_step_seconds_count{bucket="2,1,8",kind="decode"} 100.0
aotgaudi_entry_step_seconds_sum{bucket="2,1,8",kind="decode"} 1.5
aotgaudi_entry_step_seconds_count{bucket="other",kind="decode"} 7.0
aotgaudi_entry_step_seconds_sum{bucket="other",kind="decode"} 9.0
aotgaudi_entry_step_seconds_count{bucket="8",kind="defrag"} 7.0
aotgaudi_entry_step_seconds_sum{bucket="8",kind="defrag"} 9.0
"""


def scraped(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "metrics.txt"
    path.write_text(text)
    return path


def test_the_text_of_metrics_gives_the_mean_of_each_entry(tmp_path: Path) -> None:
    found = read_step_times(scraped(tmp_path, METRICS))

    assert {str(entry): (float(time.seconds), time.num_steps) for entry, time in found.entries.items()} == {
        "(prompt, 1, 16, 0)": (0.016, 4),
        "(prompt, 1, 32, 0)": (0.032, 1),
        "(decode, 2, 1, 8)": (0.015, 100),
    }
    assert found.num_steps == 105
    assert found.work(16).seconds(DecodeEntry(2, 1, 8)) == pytest.approx(0.015)


class Exported:
    """What the metrics of a server give of entries that took these seconds, as a collector."""

    def __init__(self, seconds: dict[Entry, float]) -> None:
        entries = {entry: EntryCounters(Total(1, each)) for entry, each in seconds.items()}
        self.snapshot = CounterSnapshot(entries, (0,) * (len(GAP_BOUNDS) + 1), 0.0)

    def collect(self) -> Iterable[Metric]:
        return entry_families(self.snapshot)


def test_what_our_own_server_writes_is_read(tmp_path: Path) -> None:
    seconds: dict[Entry, float] = {PromptEntry(1, 16, 2): 0.5, DecodeEntry(2, 1, 8): 0.25}
    registry = CollectorRegistry()
    registry.register(Exported(seconds))

    found = read_step_times(scraped(tmp_path, generate_latest(registry).decode()))

    assert {entry: float(time.seconds) for entry, time in found.entries.items()} == seconds


def test_servers_that_are_scraped_together_count_together(tmp_path: Path) -> None:
    other = METRICS.replace("{bucket", '{instance="b",bucket')
    text = METRICS + "".join(line for line in other.splitlines(keepends=True) if not line.startswith("#"))

    assert read_step_times(scraped(tmp_path, text)).entries[DecodeEntry(2, 1, 8)].num_steps == 200


@pytest.mark.parametrize(("often", "seconds"), [("2,1,8", 0.01), ("2,1,9", 0.02)])
def test_an_entry_counts_as_often_as_it_ran(tmp_path: Path, often: str, seconds: float) -> None:
    """The larger one took less, so that one term is left for both: it is that of the entry that ran often."""
    prompts = METRICS[: METRICS.index('aotgaudi_entry_step_seconds_count{bucket="2,1,8"')]
    decodes = "".join(
        rows_of(bucket, num, num * each)
        for bucket, each in (("2,1,8", 0.01), ("2,1,9", 0.02))
        for num in ([10_000 if bucket == often else 1])
    )

    work = read_step_times(scraped(tmp_path, prompts + decodes)).work(1 << 20)

    assert work.seconds(DecodeEntry(2, 1, int(often[-1]))) == pytest.approx(seconds, rel=0.01)


def rows_of(bucket: str, num: int, seconds: float) -> str:
    labels = f'{{bucket="{bucket}",kind="decode"}}'
    return f"aotgaudi_entry_step_seconds_count{labels} {num}\naotgaudi_entry_step_seconds_sum{labels} {seconds}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# HELP nothing of ours\n", "has no times of prompt entries"),
        (METRICS.replace('"prompt"', '"decode"'), "has no times of prompt entries"),
        (METRICS.replace(" 1.5", " NaN"), "has aotgaudi_entry_step_seconds_sum nan"),
        (METRICS.replace(" 1.5", " -1.5"), "has aotgaudi_entry_step_seconds_sum -1.5"),
        (METRICS.replace(" 1.5", " much"), "is not what /metrics answers"),
        ("steps and seconds\n", "is neither JSON nor the text of /metrics"),
        ("", "is neither JSON nor the text of /metrics"),
    ],
)
def test_another_text_is_refused_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        read_step_times(scraped(tmp_path, text))

    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(SpecError, match="is not UTF-8 text"):
        read_step_times(path)


LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}


def test_latent_attention_costs_what_its_rows_say_whatever_the_width_of_a_head() -> None:
    works = [_work({**LATENT, "head_dim": head_dim}) for head_dim in (8, 64)]

    assert works[0] == works[1]
    assert works[0].decode.per_pair == 2 * 4 * 2 * (40 + 32)
    assert works[0].decode.per_key == 2 * 40 * 4 * DEVICES["cpu"].balance
    projections = 64 * 4 * 24 + 64 * 40 + 4 * (32 * 36 + 20 * 64)
    assert works[0].decode.per_token == 2 * 2 * (projections + 3 * 64 * 96)


def test_entries_of_several_tokens_cost_a_part_of_a_pair_each() -> None:
    model = load_spec(MANIFESTS / "tiny-v4.cpu.toml").model
    work = _work(model.config)

    rows = 16 + (16 + 4) + (16 + 1)  # Of a block: tokens, then entries.
    assert work.decode.per_pair == 2 * 4 * (2 * 32 * rows // 16)
    read = 32 * (16 + 20 + 17) + 16 * 4  # Rows of the layers, and keys of the indexer.
    assert work.decode.per_key == -(-read * 4 // 16) * DEVICES["cpu"].balance


def _work(config: dict[str, Any]) -> WorkModel:
    spec = spec_of(model={"name": "m", "dtype": "float32", "config": config})
    return WorkModel.of(spec, DEVICES["cpu"])
