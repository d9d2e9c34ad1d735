"""Commands that are used wrong: one clear line, no traceback, nothing written over, and exit code 2 or 4."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotgaudi.cli.main import cli
from tests.environment import ROOT

TRACE = "time,prompt_tokens,generated_tokens\n0,5,5\n1,50,9\n"
NO_NUMBERS = ("nan", "inf", "-inf", "1e999", "-1", "x", "")

FILES = {
    "empty": b"",
    "binary": bytes(range(256)) * 64,
    "bracket": b"[" * 100_000,
    "brace.json": b'{"a":' * 100_000,
    "null.json": b"null",
    "list.json": b"[1, 2]",
    "text.toml": b"\xff\xfe[model]\n",
    "nul.toml": b"a = '\x00'",
    "wrong.toml": b"[model]\nname = 7\n",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTGAUDI_STORE", str(tmp_path / "store"))
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "configs").symlink_to(ROOT / "manifests" / "configs")
    spec = (ROOT / "manifests" / "tiny-llama.cpu.toml").read_text(encoding="utf-8")
    (tmp_path / "x.toml").write_text(spec)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def refusal(*words: str) -> str:
    """What a command says that is used wrong: its last line, after the usage if there is any."""
    result = CliRunner().invoke(cli, words)

    assert result.exit_code in (2, 4), (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    said = result.stderr.strip().splitlines()
    assert said[-1].lower().startswith("error: "), result.stderr
    assert sum(line.lower().startswith("error: ") for line in said) == 1
    assert len(said[-1]) < 600
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return said[-1]


@pytest.mark.process
@pytest.mark.parametrize("name", [*FILES, "folder", "not there", "a" * 300, "pipe/x"])
@pytest.mark.parametrize(
    "command",
    [
        "report {} --json",
        "coverage {}",
        "diff {} x.toml",
        "diff x.toml {}",
        "tune trace.csv --from {}",
        "tune {} --from x.toml",
        "report x.toml --json --trace {}",
        "serve --bundle {} --model folder --require-warm",
    ],
)
def test_a_file_that_is_none_of_its_kind_is_named(command: str, name: str) -> None:
    words = [name if word == "{}" else word for word in command.split()]

    said = refusal(*words)

    assert name[:40] in said or name.rpartition("/")[2] in said


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [
        "tune pipe --from x.toml",
        "serve --bundle pipe --model folder --require-warm",
    ],
)
def test_what_must_be_a_file_and_is_a_pipe_is_not_waited_for(command: str) -> None:
    """A spec may be a pipe: a shell gives one for ``<(...)``."""
    assert "pipe" in refusal(*command.split())


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize(
    "command",
    [
        "tune trace.csv --from x.toml --load",
        "tune trace.csv --from x.toml --entries",
        "serve --bundle folder --model folder --drain-delay",
        "run --bundle folder --ready-timeout",
    ],
)
def test_what_is_no_number_of_its_range_is_refused(command: str, number: str) -> None:
    *words, option = command.split()

    said = refusal(*words, f"{option}={number}", *(["--", "vllm"] if words[0] == "run" else []))

    assert option in said
