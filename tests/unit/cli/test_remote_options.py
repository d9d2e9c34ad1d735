"""``--remote`` over HTTP, and without torch; what a build says is in tests/transcripts/remote.txt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.compile import workers
from aotgaudi.manifest.manifest import Manifest
from tests.command import Command
from tests.remotes import http_server
from tests.unit.compile.test_read_through import build_all
from tests.workload import SPEC_TEXT, tiny_spec

run = Command()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a spec, a store `a` that has all of it, and an empty store `b`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers.LocalPool, "__enter__", lambda _: pytest.fail("a worker was started"))
    (tmp_path / "tiny.toml").write_text(SPEC_TEXT)
    build_all(tmp_path / "a")
    return tmp_path


def built(command: str, *arguments: object) -> list[str]:
    result = run("build", command, "tiny.toml", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout.splitlines()


def test_a_web_server_is_read(folder: Path) -> None:
    pytest.importorskip("aiohttp")
    built("cache", "--store", "a", "--remote", "./remote", "--push")
    with http_server(folder / "remote") as url:
        assert "7 fetched" in built("cache", "--store", "b", "--remote", url)[1]


@pytest.mark.process
def test_a_build_of_what_a_remote_has_imports_no_torch(folder: Path) -> None:
    built("cache", "--store", "a", "--remote", "./remote", "--push")
    script = (
        "import json, sys\n"
        "from aotgaudi.cli.main import cli\n"
        "cli(['build', 'tiny.toml', '--store', 'b', '--remote', './remote'], standalone_mode=False)\n"
        "print(json.dumps(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )

    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert "7 fetched" in done.stdout
    assert Manifest.of(tiny_spec()).id[:16] in done.stdout
