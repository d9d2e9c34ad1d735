"""What ``aotgaudi serve`` makes of its options."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotgaudi.cli.main import cli
from aotgaudi.cli.serve import API_KEY_VARIABLES
from aotgaudi.cli.served_model import served_name
from aotgaudi.errors import SpecError
from aotgaudi.phases import Phases
from aotgaudi.server.engine.channel import Begin
from aotgaudi.server.launch import ServeOptions
from aotgaudi.server.options import Access, digests_of


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


@pytest.mark.parametrize(
    "option",
    ["--max-connections", "--client-timeout", "--max-requests", "--max-prompt-tokens", "--stall-seconds"],
)
def test_limits_on_clients_and_steps_are_above_nothing(tmp_path: Path, option: str) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(tmp_path)]

    assert CliRunner().invoke(cli, ["serve", *where, option, "0"]).exit_code == 2


class NoProcess:
    """In the place of the engine's."""

    pid = 0

    def __init__(self, _: float) -> None:
        self.told: list[Begin] = []

    def begin(self, begin: Begin) -> None:
        self.told.append(begin)

    def __enter__(self) -> NoProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started, and no log is written."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # Nothing is set where a user has set this.
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr("aotgaudi.server.engine.start.EngineProcess", NoProcess)
    monkeypatch.setattr("aotgaudi.bundle.kind.is_capture", lambda _: False)


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


@pytest.mark.usefixtures("no_process")
def test_both_processes_are_told_how_to_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, str, bool]] = []

    def launched(options: ServeOptions, process: NoProcess, _: Phases) -> None:
        (begin,) = process.told
        found.append((options.seccomp, begin.seccomp, pickle.loads(pickle.dumps(begin)) == begin))

    monkeypatch.setattr("aotgaudi.server.launch.launch", launched)
    where = ["--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]

    CliRunner().invoke(cli, ["serve", *where, "--require-warm", "--seccomp", "require"])

    assert found == [("require", "require", True)]


@dataclass
class Started:
    """What a server was started with."""

    options: list[ServeOptions] = field(default_factory=list)
    sent: bytes = b""
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def started(no_process: None, monkeypatch: pytest.MonkeyPatch) -> Started:
    del no_process
    found = Started()

    def launched(options: ServeOptions, process: NoProcess, _: Phases) -> None:
        found.options.append(options)
        found.sent, found.environment = pickle.dumps(process.told), dict(os.environ)

    monkeypatch.setattr("aotgaudi.server.launch.launch", launched)
    return found


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
    for name in API_KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    where = ["--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]

    result = CliRunner().invoke(
        cli, ["serve", *where, *(one.format(keys=tmp_path / "keys") for one in options)]
    )

    (given,) = started.options
    assert given.access.key_digests == digests_of(keys, "test")
    assert b"sesame" not in started.sent
    assert "sesame" not in repr((given, started.environment, result.output, result.stderr))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--api-key", ""], "--api-key: key 1 is not an API key"),
        (["--api-key", "fine", "--api-key", "s3cret s3cret"], "--api-key: key 2 is not an API key"),
        (["--api-key-file", "/none"], "/none: cannot be read: No such file"),
        (["--allow-credentials"], "need --allowed-origins"),
        (["--allowed-methods", "GET"], "need --allowed-origins"),
        (["--allowed-origins", "[1]"], "must be a JSON list of texts"),
        (["--allowed-origins", "["], "is not JSON"),
    ],
)
@pytest.mark.usefixtures("started")
def test_a_key_or_an_origin_that_is_none_is_bad_usage(tmp_path: Path, options: list[str], said: str) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]

    result = CliRunner().invoke(cli, ["serve", *where, *options])

    assert result.exit_code == 2
    shown = f"{' '.join(result.stderr.split())} {result.exception}"
    assert said in shown
    assert "s3cret" not in shown


@pytest.mark.parametrize(
    "options",
    [
        ["--allowed-origins", "https://a.example", "--allowed-origins", "https://b.example"],
        ["--allowed-origins", '["https://a.example", "https://b.example"]'],
    ],
)
def test_origins_are_repeated_or_a_json_list(tmp_path: Path, started: Started, options: list[str]) -> None:
    where = ["--bundle", str(tmp_path), "--model", str(model_directory(tmp_path))]

    CliRunner().invoke(cli, ["serve", *where, *options, "--allowed-methods", "POST"])

    (given,) = started.options
    assert given.access == Access(
        allowed_origins=("https://a.example", "https://b.example"), allowed_methods=("POST",)
    )


def model_directory(path: Path) -> Path:
    """A directory that looks like a model's; nothing of it is read."""
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes(b"")
    return path


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
