"""`aotgaudi run` and `serve` as commands, from the light package: neither torch nor a web framework is installed there."""

from __future__ import annotations

import http.client
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.environment import make_environment
from tests.guests.conftest import ENVIRON, Captured
from tests.guests.fake import free_port
from tests.guests.running import ask, wait


@pytest.fixture(scope="module")
def aotgaudi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("light") / "venv").with_name("aotgaudi")


@contextmanager
def started(command: list[object]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(word) for word in command],
        env=ENVIRON,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_a_server_is_run_by_the_light_package(aotgaudi: Path, captured: Captured, verb: str) -> None:
    """`serve` takes the sealed command; what follows -- are flags that change no code."""
    port = free_port()
    words = [*captured.fake.words] if verb == "run" else []
    command = [aotgaudi, verb, "--bundle", captured.bundle, "--require-warm", "--listen", f"127.0.0.1:{port}"]

    with started([*command, "--", *words, "--port", free_port()]) as process:

        def is_ready() -> bool:
            assert process.poll() is None, process.communicate()
            try:
                return ask(port, "GET", "/ready")[0] == 200
            except (OSError, http.client.HTTPException):
                return False

        wait(is_ready, "ready")
        process.terminate()

        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --bundle BUNDLE", "Missing argument '-- COMMAND'"),
        ("run --bundle nowhere -- vllm serve x", "no bundle at nowhere"),
        ("run --bundle BUNDLE --listen here -- vllm serve x", "--listen: 'here' names no port"),
        ("serve --bundle BUNDLE --model m", "--model goes with bundles of programs"),
        ("serve --bundle BUNDLE --port 1", "options of the server that is run follow --"),
        ("serve --bundle nowhere --listen :1", "--listen goes with bundles that `build capture` sealed"),
        ("serve --bundle nowhere -- vllm", "words after -- go with bundles that `build capture` sealed"),
    ],
)
def test_a_mistake_is_one_line(aotgaudi: Path, captured: Captured, arguments: str, message: str) -> None:
    words = [str(captured.bundle) if word == "BUNDLE" else word for word in arguments.split()]

    done = subprocess.run([aotgaudi, *words], check=False, env=ENVIRON, capture_output=True, text=True)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
