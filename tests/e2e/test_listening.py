"""A real server on a socket file, over TLS and under a root path, started from a file of options."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.harness import (
    START_TIMEOUT_SECONDS,
    STOP_TIMEOUT_SECONDS,
    Workplace,
    command_line,
    environment,
    eventually,
)
from tests.unit.server.test_listener import make_certificate

pytestmark = pytest.mark.slow
READY = re.compile(r"ready in [0-9.]+ s: (\S+)")


def command_from(
    workplace: Workplace, folder: Path, options: Mapping[str, object], *others: str
) -> list[str]:
    given = {
        "bundle": str(workplace.bundle),
        "model": str(workplace.model),
        "require-warm": True,
        "drain-delay": 0,
        **options,
    }
    file = folder / "serve.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    return command_line("serve", "--config", file, *others)


@contextmanager
def serving(workplace: Workplace, folder: Path, options: Mapping[str, object], *others: str) -> Iterator[str]:
    """Runs a server to its end; yields the URL that its log names."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command_from(workplace, folder, options, *others),
            cwd=folder,
            env=environment(folder / "cache"),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        assert eventually(
            lambda: process.poll() is not None or READY.search(log.read_text()) is not None,
            START_TIMEOUT_SECONDS,
        )
        found = READY.search(log.read_text())
        assert found is not None, log.read_text()
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_SECONDS) == 0, log.read_text()
        assert "ERROR" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def check(http: httpx.Client, url: str) -> None:
    """Probes, asks with the official client, whole and streamed, and looks whether the guard is armed."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)
    (model,) = client.models.list()
    asked = {"model": model.id, "prompt": "the quick", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    streamed = client.completions.create(**asked, stream=True)

    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed)
    ready = http.get(f"{url}/ready").json()
    assert (ready["ready"], ready["guard"], ready["compilations"]) == (True, "seccomp+hook", 0)
    assert http.get(f"{url}/health").status_code == 200
    assert "aotgaudi_build_info" in http.get(f"{url}/metrics").text


def test_a_server_on_a_socket_file_answers_and_takes_the_file_away(
    workplace: Workplace, tmp_path: Path
) -> None:
    options = {"uds": "s.sock", "root-path": "/llm"}

    with serving(workplace, tmp_path, options) as url:
        assert url == "unix:s.sock"
        transport = httpx.HTTPTransport(uds=str(tmp_path / "s.sock"))
        with httpx.Client(transport=transport, timeout=60) as http:
            check(http, "http://chat.internal")
            check(http, "http://chat.internal/llm")

    assert not (tmp_path / "s.sock").exists()


def test_a_server_over_tls_answers_and_the_command_line_wins(workplace: Workplace, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    options = {"port": 1, "ssl-certfile": str(certificate), "ssl-keyfile": str(key)}

    with serving(workplace, tmp_path, options, "--port", "0") as url:
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=context, timeout=60) as http:
            check(http, url.replace("127.0.0.1", "localhost"))


def test_a_server_that_traces_cannot_start_programs_either_and_sends_its_spans_at_the_end(
    workplace: Workplace, tmp_path: Path
) -> None:
    pytest.importorskip("opentelemetry.instrumentation.asgi", reason="[otel] is not installed")
    from tests.unit.server.test_traces import collecting

    with collecting() as collector:
        options = {"port": 0, "otlp-traces-endpoint": collector.url}
        with serving(workplace, tmp_path, options) as url, httpx.Client(timeout=60) as http:
            check(http, url)
        spans = collector.spans()

    assert [span.name for span in spans] == ["GET /v1/models", *["POST /v1/completions"] * 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ssl-certfile": "none.pem"}, "error: none.pem: cannot be used: No such file or directory"),
        (
            {"uds": "no/such/folder/s.sock"},
            "error: no/such/folder/s.sock: cannot be listened on: No such file",
        ),
        ({"prt": 8000}, "prt: is not an option of this command (did you mean 'port'?)"),
    ],
)
def test_a_wrong_option_ends_a_start_with_2_and_one_line(
    workplace: Workplace, tmp_path: Path, options: dict[str, object], said: str
) -> None:
    done = subprocess.run(
        command_from(workplace, tmp_path, options),
        cwd=tmp_path,
        env=environment(tmp_path / "cache"),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_SECONDS,
        check=False,
    )

    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
