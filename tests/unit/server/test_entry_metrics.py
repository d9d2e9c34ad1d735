"""Metrics of entries: whose figures are under whose labels, and how many labels there can be."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from aotgaudi.engine.output import Usage
from aotgaudi.engine.stats import GAP_BOUNDS, CounterSnapshot, EntryCounters, Total
from aotgaudi.engine.steps import StepWork
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry
from aotgaudi.server.metrics import (
    OTHER,
    SAME,
    bucket_of,
    entry_families,
    kind_families,
    labelled,
)
from tests.unit.server.conftest import token

PROMPT, DECODE, DEFRAG = PromptEntry(2, 128, 3), DecodeEntry(8, 1, 64), DefragEntry(16)
SNAPSHOT = CounterSnapshot(
    entries={
        PROMPT: EntryCounters(
            Total(2, 0.5), StepWork(200, 312, 3, 9), Total(3, 1.5), Total(3, 2.0), Total(), 40, 16
        ),
        DECODE: EntryCounters(Total(5, 0.25), StepWork(20, 20, 100, 220), gaps=Total(20, 1.0)),
        DEFRAG: EntryCounters(Total(1, 0.125)),
    },
    gap_counts=(3, *(0 for _ in GAP_BOUNDS[1:]), 2),
    gap_seconds=1.0,
)


def samples(families: Iterable[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(families: Iterable[Metric], name: str, **labels: str) -> float:
    return samples(families)[name, tuple(sorted(labels.items()))]


def test_a_bucket_is_the_numbers_of_its_entry() -> None:
    assert bucket_of(PROMPT) == "2,128,3"
    assert bucket_of(DECODE) == "8,1,64"
    assert bucket_of(DEFRAG) == "16"


def test_steps_tokens_and_waits_are_under_their_entry() -> None:
    families = list(entry_families(SNAPSHOT))
    prompt, decode = {"kind": "prompt", "bucket": "2,128,3"}, {"kind": "decode", "bucket": "8,1,64"}

    assert value(families, "aotgaudi_entry_step_seconds_count", **decode) == 5
    assert value(families, "aotgaudi_entry_step_seconds_sum", **decode) == 0.25
    assert value(families, "aotgaudi_entry_tokens_total", **prompt, work="needed") == 200
    assert value(families, "aotgaudi_entry_tokens_total", **prompt, work="padding") == 312
    assert value(families, "aotgaudi_entry_blocks_total", **decode, work="padding") == 220
    assert value(families, "aotgaudi_entry_queue_seconds_sum", **prompt) == 1.5
    assert value(families, "aotgaudi_entry_first_token_seconds_count", **prompt) == 3
    assert value(families, "aotgaudi_entry_inter_token_seconds_count", **decode) == 20
    assert value(families, "aotgaudi_entry_prefix_tokens_total", **prompt, found="cached") == 16
    assert value(families, "aotgaudi_entry_prefix_tokens_total", **prompt, found="computed") == 24


def test_what_an_entry_never_does_is_not_exported() -> None:
    names = {key for key in samples(entry_families(SNAPSHOT)) if ("kind", "decode") in key[1]}

    assert not [name for name, _ in names if "queue" in name or "first_token" in name or "prefix" in name]
    assert [name for name, labels in samples(entry_families(SNAPSHOT)) if ("kind", "defrag") in labels] == [
        "aotgaudi_entry_step_seconds_count",
        "aotgaudi_entry_step_seconds_sum",
    ]


@given(st.integers(0, 12), st.integers(0, 8))
def test_labels_are_bounded_and_no_figure_is_lost(num_entries: int, most: int) -> None:
    entries: dict[Entry, EntryCounters] = {
        (PromptEntry(number, 1, 0) if number % 2 else DecodeEntry(number, 1, 1)): EntryCounters(Total(1, 1.0))
        for number in range(num_entries)
    }

    rows = list(labelled(entries, most))

    assert len(rows) <= most + 2
    assert len({labels for labels, _ in rows}) == len(rows)
    for kind in ("prompt", "decode"):
        expected = sum(entry.kind == kind for entry in entries)
        assert sum(counters.steps.num for labels, counters in rows if labels[0] == kind) == expected


def test_an_entry_keeps_its_label_when_others_come() -> None:
    first: dict[Entry, EntryCounters] = {DecodeEntry(n, 1, 1): EntryCounters(Total(1, 1.0)) for n in range(3)}
    more = {**first, **{DecodeEntry(n, 1, 1): EntryCounters(Total(1, 1.0)) for n in range(3, 9)}}

    before = {labels for labels, _ in labelled(first, 4)}
    after = dict(labelled(more, 4))

    assert before < after.keys()
    assert after["decode", OTHER].steps == Total(5, 5.0)


def test_gaps_are_a_histogram_whose_buckets_include_the_smaller_ones() -> None:
    families = list(kind_families(SNAPSHOT))

    name = "aotgaudi_inter_token_latency_seconds"
    assert value(families, f"{name}_bucket", le="0.001") == 3
    assert value(families, f"{name}_bucket", le="5.0") == 3
    assert value(families, f"{name}_bucket", le="+Inf") == 5
    assert value(families, f"{name}_count") == 5
    assert value(families, f"{name}_sum") == 1.0


# vLLM's names

BOARD = {
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum"),
    *("vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:time_per_output_token_seconds_bucket", "vllm:time_per_output_token_seconds_sum"),
    *("vllm:time_per_output_token_seconds_count", "vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum"),
    *("vllm:time_to_first_token_seconds_count", "vllm:gpu_cache_usage_perc", "vllm:request_prompt_tokens_bucket"),
    *("vllm:request_generation_tokens_bucket", "vllm:request_success_total", "vllm:request_queue_time_seconds_sum"),
    *("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    *("vllm:request_max_num_generation_tokens_sum", "vllm:kv_cache_usage_perc"),
    *("vllm:inter_token_latency_seconds_bucket", "vllm:prefix_cache_hits_total"),
}  # fmt: skip
"""What vLLM's own board asks for (examples/online_serving/prometheus_grafana/grafana.json), and newer names."""


def exposed(client: TestClient) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_vllms_board_finds_all_that_it_asks_for(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "hi"})

    found = exposed(client)

    assert found.keys() >= BOARD
    for name in BOARD:
        assert all({"model_name", "engine"} <= labels.keys() for labels in found[name]), name
    assert {labels["finished_reason"] for labels in found["vllm:request_success_total"]} == {
        *("stop", "length", "abort", "error")
    }


def test_every_name_that_has_a_counterpart_has_it_with_the_same_value(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "hi"})
    families = {each.name: each for each in text_string_to_metric_families(client.get("/metrics").text)}

    for ours, names in SAME.items():
        for name in names:
            assert values_of(families[f"vllm:{name}"]) == values_of(families[f"aotgaudi_{ours}"]), name
    assert values_of(families["vllm:kv_cache_usage_perc"]) == [5 / 12]


def values_of(family: Metric) -> list[float]:
    return [sample.value for sample in family.samples if not sample.name.endswith("_created")]


def test_both_formats_hold_all_names(client: TestClient) -> None:
    plain = client.get("/metrics").text
    openmetrics = client.get("/metrics", headers={"accept": "application/openmetrics-text"})

    assert "vllm:time_to_first_token_seconds_bucket" in plain
    assert "vllm:time_to_first_token_seconds_bucket" in openmetrics.text
    assert openmetrics.text.endswith("# EOF\n")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")


def test_a_finished_output_is_split_into_queue_prefill_and_decode(client: TestClient, engine) -> None:
    usage = Usage(3, 1, 0, 0.0)
    engine.script = lambda request_id: (token(request_id, "Hello", 1, finish_reason="stop", usage=usage),)
    client.post("/v1/completions", json={"prompt": "hi"})

    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }
    for part in ("queue", "prefill", "decode", "inference"):
        assert values[f"aotgaudi_request_{part}_time_seconds_count"] == 1
    total = sum(values[f"aotgaudi_request_{part}_time_seconds_sum"] for part in ("queue", "inference"))
    assert total == values["aotgaudi_e2e_request_latency_seconds_sum"]
    assert values["aotgaudi_request_prompt_tokens_sum"] == 3
    assert values["aotgaudi_request_generation_tokens_sum"] == 1
