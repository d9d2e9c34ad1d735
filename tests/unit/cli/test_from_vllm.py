from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from click.testing import Result

from aotgaudi.manifest.manifest import Manifest, read_manifest
from aotgaudi.spec.bucketing import NEWEST_RELEASE
from aotgaudi.spec.parse import load_spec
from tests.command import Command

run = Command("build", "manifest")

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}
CASES = Path(__file__).parent / "data" / "commands"
FLAGS = "--max-num-seqs 2 --max-num-batched-tokens 128 --max-model-len 512"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the model in it, and an environment without variables of ours."""
    for name in ("VLLM_CONTIGUOUS_PA", "VLLM_BUCKETING_STRATEGY", "PT_HPU_LAZY_MODE", "QUANT_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def run_vllm(flags: str = FLAGS, *arguments: object, model: str = "tiny", blocks: int | None = 16) -> Result:
    pin = () if blocks is None else ("--num-blocks", blocks)
    return run("--from-vllm", f"vllm serve {model} {flags}", *pin, *arguments)


def test_a_command_becomes_a_manifest_named_after_the_model(folder: Path) -> None:
    result = run_vllm()

    spec = read_manifest(folder / "tiny.manifest.json").spec
    assert result.exit_code == 0
    assert (spec.limits.num_blocks, spec.limits.max_num_batched_tokens, spec.model.name) == (16, 128, "tiny")
    assert "note: 16 KV blocks, from --num-blocks" in result.stderr
    assert "assumed: --block-size 128" in result.stderr
    assert f"assumed: --bucketing-version {NEWEST_RELEASE} (the newest release;" in result.stderr
    assert "note:" not in result.stdout


def test_the_report_does_not_disturb_json(folder: Path) -> None:
    result = run_vllm(FLAGS, "--json", "-o", "m.json")

    assert json.loads(result.stdout)["id"] == read_manifest(folder / "m.json").id


def test_the_written_spec_gives_the_same_manifest(folder: Path) -> None:
    result = run_vllm(FLAGS, "--spec-out", "server.toml")

    written = read_manifest(folder / "server.manifest.json")
    assert result.exit_code == 0
    assert Manifest.of(load_spec(folder / "server.toml")).id == written.id
    assert run("server.toml", "--check").exit_code == 0


def test_check_of_a_command_names_what_mends_it(folder: Path) -> None:
    assert run_vllm().exit_code == 0
    assert run_vllm(FLAGS, "--check").exit_code == 0

    result = run_vllm(FLAGS.replace("-seqs 2", "-seqs 4"), "--check")

    assert result.exit_code == 3
    assert (
        f"--from-vllm 'vllm serve tiny {FLAGS.replace('-seqs 2', '-seqs 4')}' --num-blocks 16"
        in result.stderr
    )


def test_the_processes_environment_counts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("VLLM_CONTIGUOUS_PA", "true")
    monkeypatch.setenv("VLLM_DECODE_BS_BUCKET_STEP", "4")

    result = run_vllm()

    assert read_manifest(folder / "tiny.manifest.json").spec.bucketing.contiguous_pa
    assert "ignored: VLLM_DECODE_BS_BUCKET_STEP=4: the exponential strategy does not read it" in result.stderr


def test_an_environment_file_stands_in_for_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("VLLM_CONTIGUOUS_PA", "true")
    (folder / "e").write_text("PT_HPU_LAZY_MODE=1\n", encoding="utf-8")

    run_vllm(FLAGS, "--env-file", "e")

    spec = read_manifest(folder / "tiny.manifest.json").spec
    assert not spec.bucketing.contiguous_pa
    assert spec.target.execution_mode == "hpu_graphs"


@pytest.mark.parametrize(("style", "contiguous"), [((), False), (("--env-file-style", "compose"), True)])
def test_quotes_in_an_environment_file_are_read_as_docker_reads_them(
    style: tuple[str, ...], contiguous: bool, folder: Path
) -> None:
    result = run_vllm(FLAGS, "--env-file", CASES / "quoted.env", *style)

    assert read_manifest(folder / "tiny.manifest.json").spec.bucketing.contiguous_pa is contiguous
    assert ("quotes and ' #' in VLLM_CONTIGUOUS_PA are part of the value" in result.stderr) is not contiguous


def test_names_alone_take_the_callers_value(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_DEVICES", "all")
    monkeypatch.delenv("HF_TOKEN", raising=False)

    result = run_vllm(FLAGS, "--env-file", CASES / "bare-names.env")

    assert result.exit_code == 0
    assert "bare-names.env: skipped HF_TOKEN: a name alone takes" in result.stderr
    assert read_manifest(folder / "tiny.manifest.json").spec.target.execution_mode == "hpu_graphs"


@pytest.mark.parametrize(
    ("case", "version", "length", "rule"),
    [
        (
            "rope-yarn",
            "v0.26.0",
            131072,
            "original_max_position_embeddings 32,768 x factor 4 (yarn), as vLLM 0.26.0",
        ),
        (
            "rope-longrope",
            "v0.26.0",
            4096,
            "original_max_position_embeddings 4,096 (longrope), as vLLM 0.26.0",
        ),
        ("rope-longrope", "v0.10.1", 131072, "max_position_embeddings 131,072, as vLLM 0.10.1"),
        ("config", "v0.26.0", 131072, "max_position_embeddings 131,072, as vLLM 0.26.0"),
    ],
)
def test_the_length_follows_from_the_config_and_the_release(
    case: str, version: str, length: int, rule: str, folder: Path
) -> None:
    arguments = ("--model-config", CASES / f"{case}.json", "--bucketing-version", f"vllm-gaudi@{version}")

    result = run_vllm("--max-num-seqs 4", *arguments, blocks=4000)

    assert read_manifest(folder / "tiny.manifest.json").spec.limits.max_model_len == length
    assert f"note: max_model_len {length:,}: {rule}" in result.stderr


def test_only_attention_layers_count_in_the_cache_of_a_hybrid_model(folder: Path) -> None:
    result = run_vllm("--max-num-seqs 4", "--model-config", CASES / "granite-4-h.json", blocks=4000)

    assert "memory: KV cache 3.91 GiB, " in result.stdout
    assert "KV cache: rows of 4 of 40 layers, the states of 36 not counted" in result.stdout


def test_infinity_in_a_config_is_read(folder: Path) -> None:
    config = CASES / "infinity.json"

    result = run_vllm("--max-num-seqs 4", "--model-config", config, "--spec-out", "server.toml", blocks=4000)

    assert result.exit_code == 0, result.stderr
    assert "KV cache: rows of 4 of 52 layers, the states of 24 not counted" in result.stdout
    read = load_spec(folder / "server.toml").model.config
    assert read["time_step_limit"] == [0.0, {"__float__": "Infinity"}]


def test_a_number_that_no_digest_can_hold_is_named(folder: Path) -> None:
    (folder / "big.json").write_text(json.dumps({**CONFIG, "extra": {"eos": 2**60}}), encoding="utf-8")

    result = run_vllm(FLAGS, "--model-config", "big.json")

    assert result.exit_code == 2
    assert "the model's config.json: extra.eos: " in result.stderr


def test_blocks_are_counted_from_free_memory(folder: Path) -> None:
    result = run_vllm(FLAGS, "--free-memory", "1MiB", blocks=None)

    assert result.exit_code == 0
    assert read_manifest(folder / "tiny.manifest.json").spec.limits.num_blocks == 24
    assert "32768 a block, less one for padding" in result.stderr


def test_the_version_of_the_rules(folder: Path) -> None:
    run_vllm(FLAGS, "--bucketing-version", "vllm-gaudi@v0.24.0")

    assert read_manifest(folder / "tiny.manifest.json").spec.bucketing.version == "vllm-gaudi@v0.24.0"


def test_a_config_of_its_own(folder: Path) -> None:
    (folder / "other.json").write_text(json.dumps({**CONFIG, "hidden_size": 32}), encoding="utf-8")

    result = run_vllm(FLAGS, "--model-config", "other.json", model="org/Some-8B")

    assert result.exit_code == 0
    assert read_manifest(folder / "Some-8B.manifest.json").spec.model.hidden_size == 32


def test_the_hubs_config_is_the_only_file_that_is_fetched(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    asked: list[Any] = []

    def download(*arguments: Any, **options: Any) -> str:
        asked.append((arguments, options))
        return str(folder / "tiny")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    assert run_vllm(f"{FLAGS} --revision v2", model="org/model").exit_code == 0
    ((arguments, options),) = asked
    assert arguments == ("org/model",)
    assert options["revision"] == "v2"
    assert options["allow_patterns"] == ["config.json"]


def test_the_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("no route\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("aotgaudi.share.hub.os.environ", {})
    result = run_vllm(FLAGS, model="org/model")

    assert result.exit_code == 2
    assert result.stderr == ("error: org/model cannot be had from the hub: no route (--model-config FILE)\n")


def test_a_quantized_server_on_eight_devices_is_enumerated_and_not_built(folder: Path) -> None:
    (folder / "tiny" / "config.json").write_text(
        json.dumps({**CONFIG, "num_attention_heads": 8, "intermediate_size": 128}), encoding="utf-8"
    )
    (folder / "quant.json").write_text('{"mode": "QUANTIZE"}', encoding="utf-8")
    (folder / "e").write_text("QUANT_CONFIG=quant.json\nVLLM_CONTIGOUS_PA=1\n", encoding="utf-8")

    result = run_vllm(
        f"{FLAGS} -tp 8 --kv-cache-dtype fp8_inc", "--env-file", "e", "--spec-out", "server.toml"
    )

    spec = read_manifest(folder / "server.manifest.json").spec
    assert result.exit_code == 0
    assert (spec.parallel.tensor_parallel_size, spec.parallel.kv_heads_of_rank(2)) == (8, 1)
    assert spec.model.quantization is not None
    assert (spec.model.quantization.method, spec.model.quantization.kv_cache_dtype) == ("inc", "fp8_inc")
    assert "note: QUANT_CONFIG alone turns on quantization" in result.stderr
    assert "VLLM_CONTIGOUS_PA: not known: did you mean VLLM_CONTIGUOUS_PA?" in result.stderr
    assert "(weights not counted, on each of 8 devices)" in result.stdout
    assert load_spec(folder / "server.toml") == spec

    build = Command("build")("plan", "server.manifest.json", "--store", "store")
    assert (build.exit_code, build.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "SPEC: is missing"),
        (
            ("--from-vllm", "QUANT_CONFIG=none.json vllm serve tiny", "--num-blocks", "4"),
            "QUANT_CONFIG: none.json cannot be read: No such file",
        ),
        (("x.toml", "--from-vllm", "vllm serve tiny"), "SPEC and --from-vllm both name a spec"),
        (("x.toml", "--num-blocks", "4"), "--num-blocks goes with --from-vllm"),
        (("x.toml", "--spec-out", "y.toml"), "--spec-out goes with --from-vllm"),
        (("--from-vllm", "vllm serve tiny", "--spec-out", "y.json"), "ends in .toml"),
        (("--from-vllm", "vllm serve tiny", "--spec-out", "y.toml", "--check"), "--check writes nothing"),
        (("--from-vllm", "vllm serve tiny", "--num-blocks", "4", "--free-memory", "1GiB"), "give one"),
        (("--from-vllm", "vllm serve tiny", "--num-blocks", "0"), "0 is not in the range"),
        (("--from-vllm", "vllm serve tiny", "--bucketing-version", "v9"), "'v9' is not one of"),
        (("--from-vllm", "vllm serve tiny"), "the number of KV blocks: is not pinned"),
        (("--from-vllm", "vllm serve tiny", "--free-memory", "lots"), "--free-memory: 'lots' is not a size"),
        (("--from-vllm", "vllm serve tiny", "--env-file", "none"), "none: cannot be read: No such file"),
        (("--from-vllm", "vllm serve tiny", "--model-config", "none"), "none cannot be read: No such file"),
        (("--from-vllm", "vllm serve ./none", "--num-blocks", "4"), "./none: is not a directory"),
        (
            ("--from-vllm", "vllm serve ~no.such.user/x", "--num-blocks", "4"),
            "~no.such.user/x: is not a directory",
        ),
        (("--from-vllm", f"vllm serve /{'x' * 5000}", "--num-blocks", "4"), "xxx: is not a directory"),
        (("--from-vllm", "ls", "--num-blocks", "4"), "the vLLM command: starts no server"),
        (
            ("--from-vllm", "VLLM_BUCKETING_FROM_FILE=none vllm serve tiny", "--num-blocks", "5"),
            "none cannot be read: No such file",
        ),
    ],
)
def test_wrong_use_exits_2_in_a_sentence(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_is_no_text_is_refused(folder: Path) -> None:
    (folder / "e").write_bytes(b"VLLM_A=\xff\n")

    assert "e: is not UTF-8 text" in run_vllm(FLAGS, "--env-file", "e").stderr


def test_a_spec_that_cannot_be_written_is_refused() -> None:
    result = run_vllm(FLAGS, "--spec-out", "none/x.toml")

    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_a_bucket_file_is_embedded(folder: Path) -> None:
    (folder / "b.txt").write_text("(1, 128, 0)\n(1, 1, 4)\n", encoding="utf-8")

    result = run(
        "--from-vllm",
        f"VLLM_BUCKETING_FROM_FILE=b.txt vllm serve tiny {FLAGS}",
        "--num-blocks",
        16,
        "--spec-out",
        "x.toml",
    )

    assert result.exit_code == 0
    assert load_spec(folder / "x.toml").bucketing.file_text == "(1, 128, 0)\n(1, 1, 4)\n"


def test_the_bucket_file_of_a_command_is_read_by_the_same_command(folder: Path) -> None:
    result = run_vllm(FLAGS, "--bucket-file", "b.txt")
    again = run(
        "--from-vllm",
        f"VLLM_BUCKETING_FROM_FILE=b.txt vllm serve tiny {FLAGS} --num-gpu-blocks-override 16",
        "--bucket-file",
        "c.txt",
    )

    assert (result.exit_code, again.exit_code) == (0, 0)
    assert (folder / "b.txt").read_bytes() == (folder / "c.txt").read_bytes()
    assert not (folder / "tiny.manifest.json").exists()
    assert f"VLLM_BUCKETING_FROM_FILE={folder}/b.txt" in result.stdout
