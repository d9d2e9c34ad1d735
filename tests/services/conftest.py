"""Real peers on the loopback address: docker-registry, skopeo, umoci, and an S3 server in this process.

A binary that is not installed skips its tests; with AOTGAUDI_REQUIRE_SERVICES=1 (ci/test --all --services) it fails them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aotgaudi.cli.main import cli
from tests.ports import free_port
from tests.unit.bundle.conftest import Sealed, sealed

__all__ = ["Sealed", "sealed"]

REQUIRED = os.environ.get("AOTGAUDI_REQUIRE_SERVICES") == "1"
_START_SECONDS = 20.0

USER, PASSWORD = "builder", "open sesame"
PASSWORD_HASH = "$2b$05$sxFlSbZh/vU0WMygH1du5u7R3IbNq28MAoR6rNx98rj1DMCTv.oTe"
"""Of `PASSWORD`, by bcrypt: the one form that the registry reads."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.services)


def need(binary: str) -> str:
    """Returns the path of a binary, or skips the test (fails it, where services are required)."""
    found = shutil.which(binary)
    if found is None:
        reason = f"{binary} is not installed: apt-get install {binary}"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@dataclass(frozen=True)
class RealRegistry:
    """A docker-registry at `host`, which keeps its files under `root`."""

    host: str
    root: Path

    def blob(self, digest: str) -> Path:
        """Where the registry keeps a blob (``sha256:<hex>``)."""
        sha256 = digest.removeprefix("sha256:")
        return self.root / "docker/registry/v2/blobs/sha256" / sha256[:2] / sha256 / "data"


@contextmanager
def start_registry(folder: Path, *more: str) -> Iterator[RealRegistry]:
    """Runs docker-registry on a free port. `more` are lines of its configuration."""
    binary, port, root = need("docker-registry"), free_port(), folder / "registry"
    config = folder / "registry.yml"
    lines = (
        "version: 0.1",
        f"storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}",
        f"http: {{addr: 127.0.0.1:{port}}}",
        *more,
    )
    config.write_text("\n".join(lines))
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen([binary, "serve", str(config)], stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(port), process)
        yield RealRegistry(f"127.0.0.1:{port}", root)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def wait_until(check: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not check():
        assert process.poll() is None, "the registry ended"
        assert time.monotonic() < deadline, "the registry does not answer"
        time.sleep(0.02)


def answers(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/v2/", timeout=5) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RealRegistry]:
    (tmp_path / "service").mkdir()
    with start_registry(tmp_path / "service") as registry:
        yield registry


@pytest.fixture
def closed_registry(tmp_path: Path) -> Iterator[RealRegistry]:
    """A registry that wants `USER` and `PASSWORD`."""
    folder = tmp_path / "service"
    folder.mkdir()
    (folder / "htpasswd").write_text(f"{USER}:{PASSWORD_HASH}\n")
    with start_registry(
        folder, f"auth: {{htpasswd: {{realm: here, path: {folder / 'htpasswd'}}}}}"
    ) as registry:
        yield registry


def aotgaudi(*arguments: object) -> Result:
    """Runs the command line in this process; it must end with 0."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def command(*arguments: object) -> str:
    """Runs a peer; it must end with 0. Returns its standard output."""
    need(str(arguments[0]))
    done = subprocess.run(list(map(str, arguments)), check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(root: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and mode of every file under `root`, by relative name."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode & 0o7777)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
