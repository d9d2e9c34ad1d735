"""What ``aotgaudi serve`` makes of its options."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from aotgaudi.cli.commands.serve import served_name
from aotgaudi.cli.main import cli


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


@pytest.mark.parametrize("option", ["--max-connections", "--client-timeout"])
def test_limits_on_clients_are_above_nothing(tmp_path: Path, option: str) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(tmp_path)]

    assert CliRunner().invoke(cli, ["serve", *where, option, "0"]).exit_code == 2
