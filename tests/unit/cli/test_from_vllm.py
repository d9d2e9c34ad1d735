"""``build manifest --from-vllm`` where a model comes from the hub, and files that no text can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.command import Command

FLAGS = "--max-num-seqs 2 --max-num-batched-tokens 128 --max-model-len 512"
CONFIG = (
    '{"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 100, "torch_dtype": "bfloat16"}'
)

run = Command("build", "manifest", "--num-blocks", "16", "--from-vllm")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def test_the_hubs_config_is_the_only_file_that_is_fetched(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    asked: list[Any] = []

    def download(*arguments: Any, **options: Any) -> str:
        asked.append((arguments, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    result = run(f"vllm serve org/model {FLAGS} --revision v2")

    assert result.exit_code == 0, result.output
    ((arguments, options),) = asked
    assert arguments == ("org/model",)
    assert (options["revision"], options["allow_patterns"]) == ("v2", ["config.json"])


def test_the_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("no route\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("aotgaudi.bundle.model_directory.os.environ", {})

    said = run.refusal(f"vllm serve org/model {FLAGS}")

    assert said == "error: org/model cannot be had from the hub: no route (--model-config FILE)"


def test_an_environment_that_is_no_text_and_an_endless_path_are_refused(folder: Path) -> None:
    (folder / "e").write_bytes(b"VLLM_A=\xff\n")

    assert "e: is not UTF-8 text" in run.refusal(f"vllm serve . {FLAGS}", "--env-file", "e")
    assert "xxx: is not a directory" in run.refusal(f"vllm serve /{'x' * 5000} {FLAGS}")


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("manifest", "--container c", "--container goes with --from-vllm-pod"),
        ("manifest", "--from-vllm-pod a --from-vllm-compose b", "give one of them"),
        ("capture", "-o out --container c -- vllm serve m", "--container goes with --from-vllm-pod"),
        ("capture", "-o out --from-vllm-pod a --from-vllm-compose b", "give one of them"),
    ],
)
def test_options_of_a_file_go_together_in_each_command(command: str, options: str, said: str) -> None:
    result = Command("build", command)(*options.split())

    assert (result.exit_code, said in result.output) == (2, True)
