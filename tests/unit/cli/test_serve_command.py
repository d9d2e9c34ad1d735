"""What ``aotgaudi serve`` makes of its options."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotgaudi.cli.main import cli
from aotgaudi.cli.serve import served_name
from aotgaudi.errors import SpecError
from aotgaudi.server.options import Access, digests_of
from tests.unit.cli.conftest import Started, model_directory


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


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_looked_for_while_a_server_starts_and_is_again_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    looked: list[bool] = []

    def launched(*_: object) -> None:
        looked.append(gc.isenabled())
        if fails:
            raise SpecError("the address", "is in use")

    monkeypatch.setattr("aotgaudi.server.launch.launch", launched)

    result = CliRunner().invoke(
        cli, ["serve", "--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]
    )

    assert (result.exit_code, looked, gc.isenabled()) == (2 if fails else 0, [False], True)


def test_both_processes_are_told_how_to_guard(tmp_path: Path, started: Started) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]

    CliRunner().invoke(cli, ["serve", *where, "--require-warm", "--seccomp", "require"])

    assert (started.options.seccomp, started.begin.seccomp) == ("require", "require")
    assert pickle.loads(pickle.dumps(started.begin)) == started.begin


@pytest.mark.parametrize(
    ("options", "environment", "keys"),
    [
        ([], {}, ()),
        (["--api-key", "sesame-1", "--api-key", "sesame-2"], {}, ("sesame-1", "sesame-2")),
        ([], {"AOTGAUDI_API_KEY": "sesame-1 sesame-2"}, ("sesame-1", "sesame-2")),
        ([], {"VLLM_API_KEY": "sesame-1"}, ("sesame-1",)),
        ([], {"AOTGAUDI_API_KEY": "sesame-2", "VLLM_API_KEY": "sesame-1"}, ("sesame-2",)),
        (["--api-key", "sesame-3"], {"VLLM_API_KEY": "sesame-1"}, ("sesame-3",)),
        (["--api-key-file", "{keys}"], {}, ("sesame-8", "sesame-9")),
        (
            ["--api-key-file", "{keys}"],
            {"AOTGAUDI_API_KEY": "sesame-1"},
            ("sesame-1", "sesame-8", "sesame-9"),
        ),
    ],
)
def test_keys_come_from_the_command_line_the_environment_and_a_file_and_reach_no_other_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: Started,
    options: list[str],
    environment: dict[str, str],
    keys: tuple[str, ...],
) -> None:
    (tmp_path / "keys").write_text("sesame-8\nsesame-9\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    where = ["--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]

    result = CliRunner().invoke(
        cli, ["serve", *where, *(one.format(keys=tmp_path / "keys") for one in options)]
    )

    given = started.options
    assert given.access.key_digests == digests_of(keys, "test")
    assert b"sesame" not in pickle.dumps(started.begin)
    assert "sesame" not in repr((given, started.environment, result.output, result.stderr))


@pytest.mark.parametrize(
    "options",
    [
        ["--allowed-origins", "https://a.example", "--allowed-origins", "https://b.example"],
        ["--allowed-origins", '["https://a.example", "https://b.example"]'],
    ],
)
def test_origins_are_repeated_or_a_json_list(tmp_path: Path, started: Started, options: list[str]) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]

    CliRunner().invoke(cli, ["serve", *where, *options])

    assert started.options.access == Access(allowed_origins=("https://a.example", "https://b.example"))


IMPORTED_FIRST = """
import sys
from aotgaudi.cli.main import main
from aotgaudi.server.engine import start

def begin(seconds):
    print(*sorted(sys.modules))
    raise SystemExit(0)

start.EngineProcess = begin
main()
"""


@pytest.mark.process
def test_the_engines_process_is_started_before_the_front_imports_what_it_needs_itself(tmp_path: Path) -> None:
    words = ["serve", "--require-warm", "--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]

    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_FIRST, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    heavy = {"torch", "tokenizers", "pydantic", "starlette", "uvicorn", "asyncio", "cryptography", "jinja2"}
    assert not heavy & set(done.stdout.split())
