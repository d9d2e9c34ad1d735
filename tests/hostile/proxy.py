"""Debian's nginx with ``ci/templates/nginx.conf``, as an ordinary process on a free port, in front of a server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import eventually
from tests.ports import free_port

TEMPLATE = Path(__file__).resolve().parents[2] / "ci" / "templates" / "nginx.conf"
STOP_SECONDS = 10.0


def need_nginx() -> str:
    """Returns the path of nginx, or skips the test; fails it if services are required (``ci/test --hostile``)."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        reason = "nginx is not installed: apt-get install nginx"
        if os.environ.get("AOTGAUDI_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def configuration(upstream: str, port: int, folder: Path, *, timeout_seconds: float | None = None) -> str:
    """Returns the template for these ports, with its files in `folder`; `timeout_seconds`: how long clients may take."""
    text = TEMPLATE.read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8080", f"127.0.0.1:{port}").replace("127.0.0.1:8000", upstream)
    if timeout_seconds is not None:
        text = re.sub(
            r"((?:client_header|client_body|send)_timeout) 20s;", rf"\1 {timeout_seconds:g}s;", text
        )
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    user = "user root root;\n" if os.geteuid() == 0 else ""
    main = f"{user}daemon off;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log;\n"
    return main + text.replace("http {\n", f"http {{\n{paths}", 1)


@contextmanager
def nginx_before(base_url: str, *, timeout_seconds: float | None = None) -> Iterator[str]:
    """Runs nginx in front of the server at `base_url`, and yields its own."""
    binary, port = need_nginx(), free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = configuration(base_url.removeprefix("http://"), port, folder, timeout_seconds=timeout_seconds)
        (folder / "nginx.conf").write_text(text, encoding="utf-8")
        command = [binary, "-p", name, "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            assert eventually(lambda: _answers(url)), (folder / "error.log").read_text(encoding="utf-8")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
