from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.cli.options import parse_byte_count
from aotgaudi.manifest.manifest import read_manifest
from tests.command import Command

run = Command("build", "manifest")

MANIFESTS = Path(__file__).parents[3] / "manifests"
SPECS = sorted(MANIFESTS.glob("*.toml"))
NOT_NEEDED = {
    "torch",
    "numpy",
    "rich",
    "transformers",
    "fastapi",
    "aotgaudi.wrap.from_vllm",
    "aotgaudi.manifest.schema",
}
TEXT = """
schema = "aotgaudi.spec/1"
[model]
name = "tiny"
dtype = "float32"
[model.config]
model_type = "llama"
max_position_embeddings = 512
num_hidden_layers = 2
hidden_size = 64
intermediate_size = 128
num_attention_heads = 4
vocab_size = 256
[limits]
max_num_seqs = 1
max_num_batched_tokens = 32
max_model_len = 32
block_size = 16
num_blocks = 8
[bucketing]
coverage = "upstream"
[defrag]
enabled = true
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("hidden_size", "0", "hidden_size: is 0 (a positive integer)"),
        ("hidden_size", "-64", "hidden_size: is -64 (a positive integer)"),
        ("hidden_size", "6.4", "hidden_size: is 6.4 (a positive integer)"),
        ("num_hidden_layers", "-2", "num_hidden_layers: is -2 (a positive integer)"),
        ("num_attention_heads", "0", "num_attention_heads: is 0 (a positive integer)"),
        ("num_attention_heads", "65", "num_attention_heads: is 65, with hidden_size 64 and no head_dim"),
        (
            "num_attention_heads",
            "4\nnum_key_value_heads = 3",
            "num_key_value_heads: is 3, with num_attention_heads 4",
        ),
        ("vocab_size", "0", "vocab_size: is 0 (a positive integer)"),
        ("intermediate_size", "0", "intermediate_size: is 0 (a positive integer)"),
    ],
)
def test_a_size_that_no_model_can_have_is_refused_by_its_key(
    spec: Path, key: str, value: str, problem: str
) -> None:
    was = next(line for line in TEXT.splitlines() if line.startswith(f"{key} ="))
    spec.write_text(TEXT.replace(was, f"{key} = {value}"), encoding="utf-8")

    result = run(spec)

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"model.config.{problem}" in result.stderr
    assert not spec.with_name("tiny.manifest.json").exists()


def test_more_sequences_than_blocks_are_warned_of(spec: Path) -> None:
    spec.write_text(TEXT.replace("max_num_seqs = 1", "max_num_seqs = 9"), encoding="utf-8")

    assert "warning: limits.max_num_seqs is 9, and limits.num_blocks 8: each sequence" in run(spec).stderr
    assert run(spec, "--strict").exit_code == 2
    spec.write_text(TEXT.replace("max_num_seqs = 1", "max_num_seqs = 8"), encoding="utf-8")
    assert "warning" not in run(spec).stderr


def test_manifest_lies_beside_its_spec_and_the_summary_says_what_is_in_it(spec: Path) -> None:
    result = run(spec)

    manifest = read_manifest(spec.with_name("tiny.manifest.json"))
    assert result.exit_code == 0
    assert f"id: {manifest.id}" in result.stdout
    assert "prompt          4   largest (prompt, 1, 32, 1)   padding x " in result.stdout
    assert (
        "coverage: 1 kinds of steps have no entry, the smallest: a prompt chunk of 1 token" in result.stdout
    )
    assert "memory: KV cache 144.00 KiB, " in result.stdout
    assert result.stderr == ""


def test_of_a_vllm_server_the_summary_judges_both_tables(spec: Path, tmp_path: Path) -> None:
    spec.write_text(spec.read_text(encoding="utf-8") + '\n[scheduler]\nengine = "vllm"\n', encoding="utf-8")

    lines = run(spec, "-o", tmp_path / "m.json").stdout.splitlines()
    coverage = run.document(spec, "-o", tmp_path / "m.json")["coverage"]

    assert any(line.startswith("the server's own table (vllm-gaudi@091bbad, exponential)") for line in lines)
    assert any(line.startswith("left out of the proof: decodes that count a shared block") for line in lines)
    assert coverage["scheduler"] == "vLLM (chunked prefill, prefix caching)"
    assert coverage["server_table"]["phases"][0]["kind"] == "prompt"
    assert len(coverage["left_out"]) == 1
    assert [line for line in lines if line.startswith("  not closed: ")] == [
        f"  not closed: {row['kind']}: {row['text']}"
        for row in coverage["live_graphs"]
        if row["state"] == "open"
    ]


def test_output_and_json(spec: Path, tmp_path: Path) -> None:
    result = run(spec, "-o", tmp_path / "m.json", "--json")

    summary = json.loads(result.stdout)
    assert summary["id"] == read_manifest(tmp_path / "m.json").id
    assert summary["num_entries"] == {
        "prompt": 4,
        "decode": 2,
        "unified": 0,
        "vision": 0,
        "sampler": 18,
        "defrag": 0,
        "mhc": 0,
    }
    assert summary["coverage"]["closed"] is False
    assert len(summary["uncovered"]) == 1
    assert summary["padding"]["decode"] == {
        "mean": 1.0,
        "error": 0.0,
        "worst": 1.0,
        "worst_step": [1, 1, 1],
        "sampled": False,
    }
    assert not spec.with_name("tiny.manifest.json").exists()


def test_check_of_a_missing_manifest_exits_3_and_writes_nothing(spec: Path) -> None:
    result = run(spec, "--check")

    path = spec.with_name("tiny.manifest.json")
    assert result.exit_code == 3
    assert result.stderr == f"error: {path}: there is no manifest (run `aotgaudi build manifest {spec}`)\n"
    assert not path.exists()


def test_check_of_a_changed_spec_exits_3_and_names_what_differs_and_what_mends_it(spec: Path) -> None:
    output = spec.with_name("m.json")
    run(spec, "-o", output)
    spec.write_text(TEXT.replace("max_model_len = 32", "max_model_len = 48"), encoding="utf-8")

    result = run(spec, "-o", output, "--check")

    assert result.exit_code == 3
    assert "limits.max_model_len: 32 -> 48; prompt entries: +2" in result.stderr
    assert "; cause: limits.max_model_len: prompt +2, decode +1 (run" in result.stderr
    assert f"(run `aotgaudi build manifest {spec} -o {output}`)" in result.stderr
    assert result.stderr.count("\n") == 1


def test_check_notices_other_formatting(spec: Path) -> None:
    run(spec)
    path = spec.with_name("tiny.manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")

    result = run(spec, "--check")

    assert result.exit_code == 3
    assert "formatted otherwise" in result.stderr


def test_check_of_an_edited_manifest_exits_2(spec: Path) -> None:
    run(spec)
    path = spec.with_name("tiny.manifest.json")
    path.write_bytes(path.read_bytes().replace(b'"threshold": 32', b'"threshold": 33'))

    result = run(spec, "--check")

    assert result.exit_code == 2
    assert "the content hashes to" in result.stderr


def test_a_bad_spec_exits_2_and_writes_nothing(spec: Path) -> None:
    spec.write_text(TEXT.replace("num_blocks", "num_block"), encoding="utf-8")

    result = run(spec)

    assert result.exit_code == 2
    assert result.stderr == f"error: {spec}: limits.num_block: unknown key (did you mean 'num_blocks'?)\n"
    assert not spec.with_name("tiny.manifest.json").exists()


def test_memory_is_told_in_bytes_with_what_it_is_made_of(spec: Path) -> None:
    memory = run.document(spec)["memory"]

    assert memory["kv_cache_bytes"] == 9 * 16 * 2 * 64 * 4 * 2
    assert memory["steps"]["prompt"]["entry"] == "(prompt, 1, 32, 1)"
    assert memory["steps"]["prompt"]["logit_bytes"] == 256 * 4
    assert memory["budget_bytes"] is None
    assert memory["total_bytes"] == memory["kv_cache_bytes"] + memory["steps"]["prompt"]["total_bytes"]


def test_a_budget_that_is_kept_is_no_warning(spec: Path) -> None:
    result = run(spec, "--memory-budget", "1GiB", "--strict", "--json")

    assert result.exit_code == 0
    assert result.stderr == ""
    assert json.loads(result.stdout)["memory"]["budget_bytes"] == 2**30


def test_a_budget_that_is_exceeded_is_a_warning_with_the_numbers(spec: Path) -> None:
    result = run(spec, "--memory-budget", "100 KiB")

    assert result.exit_code == 0
    assert result.stderr.startswith("warning: KV cache and step buffers need ")
    assert "the budget is 100.00 KiB (144.00 KiB of it KV cache" in result.stderr
    assert spec.with_name("tiny.manifest.json").exists()


def test_a_warning_under_strict_exits_2_and_writes_nothing(spec: Path) -> None:
    result = run(spec, "--memory-budget", "100KiB", "--strict")

    assert result.exit_code == 2
    assert result.stderr.endswith("has warnings, and --strict is given (nothing was written)\n")
    assert not spec.with_name("tiny.manifest.json").exists()


def test_a_budget_for_a_model_of_unknown_size_is_a_warning(spec: Path) -> None:
    spec.write_text(TEXT.replace("vocab_size", "vocabulary"), encoding="utf-8")

    result = run(spec, "--memory-budget", "1GiB")

    assert result.exit_code == 0
    assert "the memory budget cannot be checked: model.config.vocab_size: is missing" in result.stderr
    assert "memory: not known: model.config.vocab_size" in result.stdout


@pytest.mark.parametrize("size", ["", "0", "-1GiB", "1XB", "1e3", "one", "1 GiB GiB", "9" * 400])
def test_a_budget_that_is_no_size_is_refused(spec: Path, size: str) -> None:
    result = run(spec, "--memory-budget", size)

    assert result.exit_code == 2
    assert "is not a size: a number with KiB, MiB, GiB" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("10B", 10), ("2KB", 2000), ("2 kib", 2048), ("1.5GiB", 3 * 2**29), ("0.1TB", 10**11)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_byte_count(text) == expected


def test_a_spec_that_explodes_is_a_warning_with_the_numbers(spec: Path) -> None:
    text = TEXT.replace("max_num_seqs = 1", "max_num_seqs = 64").replace(
        "num_blocks = 8", "num_blocks = 4096"
    )
    text = text.replace("embeddings = 512", "embeddings = 16384").replace(
        "max_model_len = 32", "max_model_len = 16384"
    )
    text = text.replace("tokens = 32", "tokens = 2048").replace(
        '"upstream"', '"upstream"\nstrategy = "linear"'
    )
    spec.write_text(text, encoding="utf-8")

    result = run(spec)

    assert result.exit_code == 0
    assert "step programs (" in result.stderr
    assert "hours of compiling at 14 s each, as in vllm-gaudi#1160" in result.stderr
    assert "bucketing.strategy = 'exponential' (" in result.stderr


def test_a_line_of_a_bucket_file_that_its_version_leaves_out_is_a_warning_or_an_error(spec: Path) -> None:
    bucketing = '"upstream"\nstrategy = "file"\nfile = "buckets.txt"\nversion = "vllm-gaudi@VERSION"'
    spec.with_name("buckets.txt").write_text("(1, 16, 0)\nnonsense here\n(1, 1, 2)\n", encoding="utf-8")

    spec.write_text(TEXT.replace('"upstream"', bucketing.replace("VERSION", "v0.16.0")), encoding="utf-8")
    older = run(spec)
    spec.write_text(TEXT.replace('"upstream"', bucketing.replace("VERSION", "091bbad")), encoding="utf-8")
    newer = run(spec)

    assert older.exit_code == 0
    assert "warning: bucketing.file, line 2 is left out" in older.stderr
    assert newer.exit_code == 2
    assert "bucketing.file, line 2" in newer.stderr


def test_on_a_terminal_it_is_a_table(spec: Path) -> None:
    script = shutil.which("script")
    if script is None:
        pytest.skip("no `script` here, which makes a terminal")
    command = f"{sys.executable} -m aotgaudi build manifest {spec}"

    text = subprocess.run(
        [script, "-qec", command, "/dev/null"], capture_output=True, text=True, check=True
    ).stdout

    assert "│ prompt " in text
    assert "coverage: " in text


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_committed_manifests_are_up_to_date_and_closed(path: Path) -> None:
    result = run(path, "--check", "--json")

    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["uncovered"] == []


def test_there_are_committed_manifests() -> None:
    assert {path.name for path in SPECS} >= {
        "llama-3.1-8b.gaudi3.toml",
        "smollm2-135m.cpu.toml",
        "tiny-llama.cpu.toml",
    }


def test_whole_command_imports_nothing_that_it_does_not_need(spec: Path) -> None:
    code = (
        "import sys\nfrom aotgaudi.cli.main import cli\n"
        f"try: cli.main(['build', 'manifest', {str(spec)!r}], prog_name='aotgaudi')\n"
        "except SystemExit: pass\n"
        f"sys.exit(' '.join({NOT_NEEDED!r} & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert process.stderr.strip() == ""
    assert spec.with_name("tiny.manifest.json").exists()


def test_the_warm_up_log_takes_the_place_of_the_summary(spec: Path) -> None:
    result = run(spec, "--warm-up-log")

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == "INFO Warming up sampler with batch sizes: [1] and following configs:"
    assert lines[1] == "INFO temp=0.0, top_p=1.0, top_k=0, batch_changed=True"
    assert lines[-1] == "INFO Defragmenter warmup completed successfully"
    assert run.document(spec, "--warm-up-log")["warm_up_log"] == lines
    assert "warm_up_log" not in run.document(spec)


CLOSED = TEXT.replace('[bucketing]\ncoverage = "upstream"\n', "")


def test_a_bucket_file_alone_and_what_its_server_needs(spec: Path, tmp_path: Path) -> None:
    spec.write_text(CLOSED, encoding="utf-8")

    result = run(spec, "--bucket-file", tmp_path / "tiny.buckets")
    document = run.document(spec, "--bucket-file", tmp_path / "tiny.buckets")

    assert result.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.buckets", "tiny.toml"]
    lines = result.stdout.splitlines()
    assert lines[0] == f"{tmp_path}/tiny.buckets: 3 prompt buckets and 2 decode buckets for tiny"
    assert f"set: VLLM_BUCKETING_FROM_FILE={tmp_path}/tiny.buckets VLLM_CONTIGUOUS_PA=false" in lines
    assert lines[-1].startswith("the server's flags: --num-gpu-blocks-override 8 --block-size 16 ")
    assert document["num_buckets"] == {"prompt": 3, "decode": 2}
    assert document["flags"]["num-gpu-blocks-override"] == 8


def test_a_bucket_file_beside_the_manifest(spec: Path, tmp_path: Path) -> None:
    spec.write_text(CLOSED, encoding="utf-8")

    result = run(spec, "--bucket-file", tmp_path / "b", "-o", tmp_path / "m.json", "--json")

    assert json.loads(result.stdout)["id"] == read_manifest(tmp_path / "m.json").id
    assert (tmp_path / "b").read_text(encoding="utf-8").startswith("# buckets for vllm-gaudi@091bbad")


def test_a_bucket_file_is_checked(spec: Path, tmp_path: Path) -> None:
    spec.write_text(CLOSED, encoding="utf-8")
    path = tmp_path / "b"

    missing = run(spec, "--bucket-file", path, "--check")
    assert (missing.exit_code, path.exists()) == (3, False)
    assert "there is no bucket file (run `aotgaudi build manifest" in missing.stderr
    assert run(spec, "--bucket-file", path).exit_code == 0
    assert run(spec, "--bucket-file", path, "--check").exit_code == 0
    path.write_text("(1, 1, 1)\n", encoding="utf-8")
    assert "is out of date" in run(spec, "--bucket-file", path, "--check").stderr


def test_a_bucket_file_that_cannot_be_is_not_written(spec: Path, tmp_path: Path) -> None:
    spec.write_text(CLOSED + '[bucketing]\nversion = "vllm-gaudi@v0.16.0"\n', encoding="utf-8")

    result = run(spec, "--bucket-file", tmp_path / "b")

    assert result.exit_code == 7
    assert "the smallest: a prompt chunk of 1 token after 17 tokens" in result.stderr
    assert not (tmp_path / "b").exists()


def test_the_warm_up_log_is_not_of_a_bucket_file(spec: Path, tmp_path: Path) -> None:
    result = run(spec, "--bucket-file", tmp_path / "b", "--warm-up-log")

    assert result.exit_code == 2
    assert "--warm-up-log is of a manifest" in result.stderr
