"""``--tier`` and ``--budget`` of the commands that build, and ``--part`` of what seals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.store import Store
from tests.command import Command
from tests.specs import spec_toml
from tests.workload import seed

run = Command("build")

TOML = spec_toml(
    """
[sampler]
settings = [{ temperature = 0.0, top_p = 1.0, top_k = 0 }]
[defrag]
enabled = false
[target]
backend = "fake"
"""
)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec in the current folder; the store beside it has its programs traced, each of one unit."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(TOML, encoding="utf-8")
    manifest = Manifest.of(load_spec(path))
    store = Store.open(tmp_path / "store")
    labels = [(f"layer {number}",) for number in range(len(manifest.entries))]
    seed(store, manifest.spec, manifest.entries, labels)
    return path


def test_a_tier_is_built_and_sealed_as_a_part(spec: Path) -> None:
    result = run("all", spec, "--store", "store", "--tier", "least", "-j", "1")

    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("part: "))
    assert "max_model_len 32" in line
    part = open_bundle("tiny.bundle").receipt.part
    assert part is not None
    assert part.limits.max_model_len == 32


def test_what_a_budget_of_entries_leaves_in_the_store_is_sealed_by_part(spec: Path) -> None:
    cached = run("cache", spec, "--store", "store", "--budget", "6", "-j", "1", "--json")
    sealed = run("bundle", spec, "-o", "out", "--store", "store", "--part", "--json")

    assert (cached.exit_code, sealed.exit_code) == (0, 0), sealed.output
    built, held = json.loads(cached.stdout)["part"], json.loads(sealed.stdout)["part"]
    assert built == held
    assert held["num_entries"] >= 6
    assert json.loads(sealed.stdout)["num_entries_built"] < json.loads(sealed.stdout)["num_entries"]


def test_a_budget_of_time_says_when_it_is_over_and_the_next_run_goes_on(spec: Path) -> None:
    first = run("cache", spec, "--store", "store", "--budget", "0.000001s", "-j", "1")
    then = run("cache", spec, "--store", "store", "-j", "1", "--json")

    assert first.exit_code == then.exit_code == 0, first.output
    assert "the time is over, run again to go on" in first.stdout
    assert "part: " in first.stdout
    assert json.loads(then.stdout)["num_compiled"] > 0


def test_a_part_that_turns_out_to_be_all_is_a_whole_bundle(spec: Path) -> None:
    result = run("all", spec, "--store", "store", "--budget", "1000", "-j", "1")

    assert result.exit_code == 0, result.output
    assert "part:" not in result.stdout
    assert open_bundle("tiny.bundle").receipt.part is None


def test_nothing_built_is_no_part(spec: Path) -> None:
    result = run("bundle", spec, "-o", "out", "--store", "empty", "--part")

    assert result.exit_code == 3
    assert "can serve nothing" in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("value", ["0", "0s", "-1", "ten", "1.5", "10 m", "1d", "", "nan", "1e3s"])
def test_what_is_no_budget_is_bad_usage(spec: Path, value: str) -> None:
    result = run("cache", spec, "--store", "store", f"--budget={value}")

    assert result.exit_code == 2
    assert "a time such as 90s, 10m or 1.5h, or a number of entries" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cache", "--tier", "hot", "--budget", "5m"], "exclude each other"),
        (["all", "--tier", "hot", "--budget", "5"], "exclude each other"),
        (["cache", "--tier", "hot", "--check"], "they exclude --entry and --check"),
        (["cache", "--tier", "hot", "--entry", "(prompt, 1, 16, 0)"], "they exclude --entry and --check"),
        (["cache", "--tier", "warm"], "'warm' is not one of"),
        (["cache", "--trace", "trace.csv"], "it goes with --tier or --budget"),
    ],
)
def test_misuse_is_one_line(spec: Path, arguments: list[str], said: str) -> None:
    result = run(arguments[0], spec, "--store", "store", *arguments[1:])

    assert result.exit_code == 2
    assert said in result.stderr


def test_a_manifest_of_which_no_part_is_closed_exits_with_7(spec: Path) -> None:
    spec.write_text(
        TOML + '\n[bucketing]\nstrategy = "unified"\nversion = "vllm-gaudi@v0.16.0"\n', encoding="utf-8"
    )

    result = run("cache", spec, "--store", "store", "--tier", "least")

    assert result.exit_code == 7, result.output
    assert "no subset of this manifest is closed" in result.stderr


def test_plan_shows_what_a_tier_takes(spec: Path) -> None:
    tier = run("plan", spec, "--store", "store", "--tier", "least", "--json")
    everything = run("plan", spec, "--store", "store", "--json")

    assert tier.exit_code == everything.exit_code == 0, tier.output
    assert 0 < len(json.loads(tier.stdout)["compile"]) < len(json.loads(everything.stdout)["compile"])


def test_explain_says_what_could_be_served_of_what_is_warm_and_what_a_bundle_holds(spec: Path) -> None:
    assert run("all", spec, "--store", "store", "--tier", "least", "-j", "1").exit_code == 0

    here = Command("explain")(spec, "--store", "store")
    there = Command("explain")(spec, "--store", "store", "--against", "tiny.bundle")

    assert here.exit_code == there.exit_code == 0, here.output
    assert "what is warm, as a part (build bundle --part): " in here.stdout
    assert "it holds a part: " in there.stdout
    assert "closed under max_model_len 32" in here.stdout
    assert "closed under max_model_len 32" in there.stdout


def test_a_trace_says_what_is_built_first(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(
        "time,prompt_tokens,generated_tokens\n0,60,4\n1,70,4\n", encoding="utf-8"
    )

    result = run("all", spec, "--store", "store", "--tier", "hot", "--trace", "trace.csv", "-j", "1")

    assert result.exit_code == 0, result.output
    part = open_bundle("tiny.bundle").receipt.part
    assert part is not None
    assert part.limits.max_model_len >= 74
