"""What ``aotgaudi serve`` makes of its options."""

from __future__ import annotations

import gc
import logging
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotgaudi.bundle.bundle import Acceptance
from aotgaudi.cli.commands.serve import served_name
from aotgaudi.cli.main import cli
from aotgaudi.errors import SpecError
from aotgaudi.llm.running import ModelOptions
from aotgaudi.server.front.limits import Listening
from aotgaudi.server.launch import ServeOptions


def test_a_model_is_served_under_the_name_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshots" / "0a1b").mkdir(parents=True)
    (tmp_path / "chat").symlink_to(tmp_path / "snapshots" / "0a1b")
    monkeypatch.chdir(tmp_path / "snapshots" / "0a1b")

    assert served_name(str(tmp_path / "snapshots" / "0a1b")) == "0a1b"
    assert served_name(str(tmp_path / "chat")) == "chat"
    assert served_name(str(tmp_path / "chat" / "")) == "chat"
    assert served_name(".") == "0a1b"
    assert served_name("..") == "snapshots"
    assert served_name("owner/name") == "owner/name"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"temprature": 1}', "has 'temprature'; the sampling defaults are temperature, top_p"),
    ],
)
def test_a_malformed_override_is_bad_usage(tmp_path: Path, value: str, said: str) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(tmp_path)]

    result = CliRunner().invoke(cli, ["serve", *where, "--override-generation-config", value])

    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_a_delay_is_not_negative(tmp_path: Path) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(tmp_path)]

    assert CliRunner().invoke(cli, ["serve", *where, "--drain-delay", "-1"]).exit_code == 2


@pytest.mark.parametrize(
    "option",
    ["--max-connections", "--client-timeout", "--max-requests", "--max-prompt-tokens", "--stall-seconds"],
)
def test_limits_on_clients_and_steps_are_above_nothing(tmp_path: Path, option: str) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(tmp_path)]

    assert CliRunner().invoke(cli, ["serve", *where, option, "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("require_warm", "asked", "expected"),
    [(True, None, 60), (True, 5.0, 5), (False, None, math.inf), (False, 900.0, 900)],
)
def test_only_a_step_that_builds_nothing_has_a_limit_of_its_own(
    tmp_path: Path, require_warm: bool, asked: float | None, expected: float
) -> None:
    model = ModelOptions(
        bundle=tmp_path,
        acceptance=Acceptance(),
        model_dir=tmp_path,
        require_warm=require_warm,
        num_threads=1,
        store_root=tmp_path,
    )

    options = ServeOptions(
        model=model, listening=Listening(host="", port=0), served_model_names=(), stall_seconds=asked
    )

    assert options.longest_step_seconds == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--outside", "refuse"], "--outside refuse serves what is warm: it needs --require-warm"),
        (["--outside", "chunk"], "it needs --require-warm"),
        (["--outside", "pad-up"], "it needs --require-warm"),
        (["--outside", "first-use", "--require-warm"], "it excludes --require-warm"),
        (["--outside", "drop"], "'drop' is not one of"),
    ],
)
def test_what_lies_outside_is_compiled_or_not_as_require_warm_says(
    tmp_path: Path, options: list[str], said: str
) -> None:
    result = CliRunner().invoke(cli, ["serve", "--bundle", str(tmp_path), "--model", str(tmp_path), *options])

    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_looked_for_while_a_server_starts_and_is_again_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    looked: list[bool] = []

    def launched(_: ServeOptions) -> None:
        looked.append(gc.isenabled())
        if fails:
            raise SpecError("the address", "is in use")

    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # Nothing is set where a user has set this.
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr("aotgaudi.runtime.preload.begin_to_load_torch", lambda: None)
    monkeypatch.setattr("aotgaudi.bundle.sealed.is_capture", lambda _: False)
    monkeypatch.setattr("aotgaudi.server.launch.launch", launched)

    result = CliRunner().invoke(
        cli, ["serve", "--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]
    )

    assert (result.exit_code, looked, gc.isenabled()) == (2 if fails else 0, [False], True)


def model_directory(path: Path) -> Path:
    """A directory that looks like a model's; nothing of it is read."""
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes(b"")
    return path
