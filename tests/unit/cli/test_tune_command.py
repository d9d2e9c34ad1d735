"""``aotgaudi tune``: a trace and a spec in, a spec with the cheapest buckets out; every mistake is one line."""

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
from aotgaudi.report.holdings import entry_mean, holdings_of_bundle
from aotgaudi.spec.parse import load_spec
from aotgaudi.spec.write import write_spec
from aotgaudi.store.store import Store
from tests.specs import spec_of
from tests.unit.compile.conftest import store
from tests.unit.report.reports import sealed_bundle

__all__ = ["store"]

CONFIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip
TRACE = "time,prompt_tokens,generated_tokens\n" + "".join(
    f"{second / 10},{1 + second * 37 % 90},{1 + second * 11 % 30}\n" for second in range(60)
)
STEP_TIMES = {
    "(prompt, 1, 16, 0)": 0.02, "(prompt, 1, 32, 0)": {"median": 0.03}, "(prompt, 1, 32, 4)": 0.035,
    "(decode, 1, 1, 1)": 0.01, "(decode, 2, 1, 8)": 0.012, "(decode, 2, 1, 24)": 0.014,
}  # fmt: skip


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


def test_it_says_what_today_and_the_nearest_budgets_cost(spec: Path, trace: Path) -> None:
    found = document(tune(trace, "--from", spec, "--entries", 12, "--json"))

    assert [one["name"] for one in found["strategies"]] == [
        "exponential (today's)",
        "linear",
        "padding_aware",
    ]
    assert [one["name"] for one in found["nearest"]] == [
        f"tuned, {num} entries" for num in (6, 9, 12, 15, 18)
    ]
    works = [one["work"] for one in found["nearest"]]
    assert works[0] > works[2] > works[4]
    assert all(one["needed"] == found["tuned"]["needed"] for one in (*found["strategies"], *found["nearest"]))
    assert found["nearest"][2]["work"] == found["tuned"]["work"]


def test_the_same_is_printed_as_text(spec: Path, trace: Path) -> None:
    found = document(tune(trace, "--from", spec, "--json"))

    text = tune(trace, "--from", spec).stdout

    assert f"tuned: {found['prompts']} prompt and {found['decodes']} decode entries, closed" in text
    for one in (*found["strategies"], *found["nearest"], found["replayed"]):
        assert f"  {one['name']}" in text


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


def test_measured_seconds_take_the_place_of_the_estimate(spec: Path, trace: Path, tmp_path: Path) -> None:
    times = tmp_path / "steps.json"
    times.write_text(json.dumps({"measurements": {"buckets": STEP_TIMES}}))

    assert document(tune(trace, "--from", spec, "--step-times", times, "--json"))["unit"] == "ns"


def test_what_is_measured_and_how_well_a_fit_says_it_is_told(spec: Path, trace: Path, tmp_path: Path) -> None:
    times = tmp_path / "metrics.txt"
    times.write_text(
        "".join(
            f'aotgaudi_entry_step_seconds_{name}{{kind="{kind}",bucket="{bucket}"}} {value}\n'
            for kind, bucket, num, seconds in (
                ("prompt", "1,16,0", 10, 0.2),
                ("prompt", "1,32,0", 5, 0.2),
                ("prompt", "1,17,3", 1, 0.05),
                ("decode", "1,1,1", 100, 0.5),
            )
            for name, value in (("count", num), ("sum", seconds))
        )
    )
    today = Manifest.of(load_spec(spec))
    num_today = len(today.of_kind("prompt")) + len(today.of_kind("decode"))

    found = document(tune(trace, "--from", spec, "--step-times", times, "--json"))["step_times"]
    text = tune(trace, "--from", spec, "--step-times", times).stdout

    assert (found["entries"], found["steps"]) == (4, 116)
    assert (found["today"], found["of_today"]) == (num_today, 3)
    assert 0 <= found["median_miss"] <= found["largest_miss"]
    assert f"4 entries measured in 116 steps; of today's {num_today} entries 3 are among them" in text
    assert "all work is by a fit to these, of entries that were not measured as well" in text
    assert "step times" not in tune(trace, "--from", spec).stdout


def test_a_bundle_and_the_records_of_its_store_say_what_entries_take(
    store: Store, trace: Path, spec: Path, tmp_path: Path
) -> None:
    bundle = sealed_bundle(store, tmp_path / "x.bundle")
    held = holdings_of_bundle(bundle, store)
    prompt, decode = (entry_mean(held, kind) for kind in ("prompt", "decode"))
    assert prompt is not None
    assert decode is not None
    seconds = (prompt.compile_seconds or 0) * 9 + (decode.compile_seconds or 0) * 9
    size = round(9 * (prompt.size_bytes + decode.size_bytes))
    given = ["--built", bundle.path, "--store", store.root]

    timed = document(tune(trace, "--from", spec, *given, "--build-seconds", seconds, "--json"))
    sized = document(tune(trace, "--from", spec, "--built", bundle.path, "--graph-memory", size, "--json"))

    for found, price in (
        (timed, (prompt.compile_seconds, decode.compile_seconds)),
        (sized, (prompt.size_bytes, decode.size_bytes)),
    ):
        (budget,) = found["budgets"]
        assert (budget["prompt"], budget["decode"]) == price
        assert budget["takes"] <= budget["most"]
        assert str(bundle.path) in budget["source"]
        assert found["tuned"]["num_entries"] <= found["budget"]


def test_an_average_of_another_machine_is_called_that(spec: Path, trace: Path) -> None:
    text = tune(trace, "--from", spec, "--build-seconds", 140).stdout

    assert "--build-seconds 140: 140 by 14 a prompt entry and 14 a decode entry" in text
    assert "a per-entry average of another machine's (vllm-gaudi#1160)" in text


def test_a_bundle_without_its_store_has_no_seconds(
    store: Store, trace: Path, spec: Path, tmp_path: Path
) -> None:
    bundle = sealed_bundle(store, tmp_path / "x.bundle")

    result = tune(trace, "--from", spec, "--built", bundle.path, "--build-seconds", 100)

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "a bundle has no times" in result.stderr
    assert "--built" in tune(trace, "--from", spec, "--store", tmp_path).stderr


@pytest.mark.parametrize(
    ("budget", "most"),
    [
        (["--build-seconds", 100], 7),
        (["--build-seconds", 100, "--seconds-per-entry", 10], 10),
        (["--graph-memory", "1MiB", "--bytes-per-entry", "128KiB"], 8),
        (["--entries", 20, "--build-seconds", 100], 7),
    ],
)
def test_other_budgets_stand_for_a_number_of_entries(
    spec: Path, trace: Path, budget: list[Any], most: int
) -> None:
    found = document(tune(trace, "--from", spec, *budget, "--json"))

    assert found["budget"] == most
    assert found["tuned"]["num_entries"] <= most


def test_a_faster_trace_runs_more_at_once(spec: Path, trace: Path) -> None:
    slow, fast = (document(tune(trace, "--from", spec, "--load", load, "--json")) for load in (0.01, 1e6))

    assert fast["steps"] < slow["steps"]
    assert fast["seconds"] < slow["seconds"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--graph-memory", "1GiB"], "--graph-memory: does not say what one graph takes"),
        (["--build-seconds", "1"], "the budget: is less than 2 entries take (2 to 400 entries)"),
    ],
)
def test_a_wrong_option_gets_one_line(spec: Path, trace: Path, arguments: list[str], problem: str) -> None:
    result = tune(trace, "--from", spec, *arguments)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {problem}")
    assert result.stderr.count("\n") == 1


def test_a_bad_trace_gets_one_line_and_nothing_is_written(spec: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "bad.csv", tmp_path / "tuned.toml"
    path.write_text("time,prompt_tokens,generated_tokens\n0,-4,1\n")

    result = tune(path, "--from", spec, "-o", output)

    assert result.exit_code == 2
    assert (
        result.stderr
        == f"error: {path}, line 2: has '-4' prompt tokens (a whole number from 1 to 2,147,483,647)\n"
    )
    assert not output.exists()


def test_histograms_need_a_rate(spec: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    names = ("prompt", "generation")
    path.write_text(
        "".join(
            f'vllm:request_{name}_tokens_bucket{{le="{bound}"}} 50\n'
            for name in names
            for bound in ("20", "+Inf")
        )
    )

    assert "--requests-per-second" in tune(path, "--from", spec).stderr
    assert document(tune(path, "--from", spec, "--requests-per-second", 5, "--json"))["requests"] == 50
