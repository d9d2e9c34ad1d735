"""`aotgaudi run` and `serve` as commands, from the light package: neither torch nor a web framework is installed there."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.environment import make_environment
from tests.guests.conftest import ENVIRON, Captured
from tests.guests.running import ask, wait
from tests.ports import free_port


@pytest.fixture(scope="module")
def aotgaudi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("light") / "venv").with_name("aotgaudi")


@contextmanager
def started(command: list[object], log: IO[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(word) for word in command],
        env=ENVIRON,
        stderr=subprocess.PIPE if log is None else log,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("log_format", "has_command"), [("text", True), ("json", False)])
def test_a_server_is_run_by_the_light_package(
    aotgaudi: Path, captured: Captured, log_format: str, has_command: bool, tmp_path: Path
) -> None:
    """Without a command, it is the sealed one."""
    port, log_path = free_port(), tmp_path / "log"
    options = ["--require-warm", "--listen", f"127.0.0.1:{port}", "--log-format", log_format]
    command = [aotgaudi, "run", "--bundle", captured.bundle, *options]
    words = ["--", *captured.fake.words, "--port", free_port()] if has_command else []

    with (
        log_path.open("w", encoding="utf-8") as log,
        started([*command, *words], log) as process,
    ):

        def is_ready() -> bool:
            assert process.poll() is None, log_path.read_text(encoding="utf-8")
            try:
                return ask(port, "GET", "/ready")[0] == 200
            except (OSError, http.client.HTTPException):
                return False

        wait(is_ready, "ready")
        process.terminate()

        assert process.wait(60) == 0
    _check_log(log_path.read_text(encoding="utf-8"), log_format)


def _check_log(log: str, log_format: str) -> None:
    """Our own lines are told from the server's, which writes to the same stream."""
    told = [line for line in log.splitlines() if "ready after " in line]
    assert len(told) == 1, log
    if log_format == "text":
        assert re.fullmatch(r"[-\d]{10} \d\d:\d\d:\d\d aotgaudi INFO ready after \d+\.\d s: warm", told[0])
        return
    line = json.loads(told[0])
    assert line.keys() == {"time", "level", "logger", "message", "request_id"}
    assert (line["level"], line["logger"], line["request_id"]) == ("INFO", "aotgaudi.wrap.supervise", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --bundle nowhere -- vllm serve x", "no bundle at nowhere"),
        ("run --bundle BUNDLE --listen here -- vllm serve x", "--listen: 'here' names no port"),
        ("serve --bundle BUNDLE", "holds the caches of another server: aotgaudi run --bundle"),
    ],
)
def test_a_mistake_is_one_line(aotgaudi: Path, captured: Captured, arguments: str, message: str) -> None:
    words = [str(captured.bundle) if word == "BUNDLE" else word for word in arguments.split()]

    done = subprocess.run([aotgaudi, *words], check=False, env=ENVIRON, capture_output=True, text=True)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
