"""Commands in the forms in which people keep them: each is read as the plain command is, or refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from aotgaudi.commands.starts import ENGINES
from tests.command import Command

DATA = Path(__file__).parent / "data/kept_commands.yaml"
CASES = yaml.safe_load(DATA.read_text(encoding="utf-8"))
PLAIN = "vllm serve /models/tiny --max-num-seqs 4 --max-num-batched-tokens 128 --max-model-len 256"
CONFIG = {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 100, "torch_dtype": "bfloat16"}

build = Command("build", "manifest", "--num-blocks", "64", "-o", "m.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def written(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.replace("HERE", str(folder)), encoding="utf-8")


def options_of(case: Mapping[str, Any], folder: Path) -> list[str]:
    form = next(form for form in ("text", "pod", "compose") if form in case)
    named = ["--container", case["name"]] if "name" in case else []
    if form == "text":
        return ["--from-vllm", case["text"]]
    written(folder, {f"{form}.yaml": case[form]})
    return [f"--from-vllm-{form}", f"{form}.yaml", *named]


def test_there_are_many_in_each_form() -> None:
    assert len(CASES) >= 40
    assert {word for case in CASES for word in case.get("text", "").split()} >= ENGINES


@pytest.mark.parametrize("case", CASES, ids=[case["case"].replace(" ", "_") for case in CASES])
def test_each_is_read_as_the_plain_command_is(
    case: Mapping[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, case.get("files", {}))
    variables = "".join(f"{name}={value}\n" for name, value in case.get("environment", {}).items())
    written(folder, {"plain.env": variables})
    config = ["--model-config", "tiny/config.json"]
    plain = f"{PLAIN} {case.get('flags', '')}"
    expected = build.document("--from-vllm", plain, "--env-file", "plain.env", *config)["id"]
    for name, value in case.get("caller", {}).items():
        monkeypatch.setenv(name, value)

    found = build.document(*options_of(case, folder), *([] if case.get("is_mounted") else config))["id"]

    assert found == expected
