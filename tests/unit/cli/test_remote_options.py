"""``--remote`` and ``--push``: what a build says, and what misuse gives."""

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
NUM_RECORDS = 7


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


def test_one_store_gives_and_another_takes(folder: Path) -> None:
    given = built("all", "--store", "a", "-o", "a.bundle", "--remote", "./remote", "--push")
    taken = built("all", "--store", "b", "-o", "b.bundle", "--remote", "./remote")

    assert given[2].startswith(
        f"remote: ./remote: {NUM_RECORDS} results were here, 0 fetched (0 bytes in 0.0 s)"
    )
    assert given[2].endswith(", 7 results uploaded (3.0 kB)")
    assert taken[1] == "cache: nothing to do"
    assert taken[2].startswith("remote: ./remote: 0 results were here, 7 fetched (3.0 kB in ")
    assert taken[2].endswith(" s), 0 units compiled, 0 results uploaded")
    for path in (path for path in (folder / "a.bundle").rglob("*") if path.is_file()):
        assert (folder / "b.bundle" / path.relative_to(folder / "a.bundle")).read_bytes() == path.read_bytes()


def test_the_environment_names_the_remote_and_json_says_what_came(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    built("cache", "--store", "a", "--remote", f"file://{folder}/remote", "--push")
    monkeypatch.setenv("AOTGAUDI_REMOTE", str(folder / "remote"))

    document = Command("build", "cache").document("tiny.toml", "--store", "b")["remote"]

    assert document.pop("fetch_seconds") >= 0
    assert document.pop("fetched_bytes") > 2000
    assert document == {
        "remote": str(folder / "remote"),
        "num_here": 0,
        "num_fetched": NUM_RECORDS,
        "num_uploaded": 0,
        "uploaded_bytes": 0,
    }


def test_a_store_that_has_all_asks_nothing(folder: Path) -> None:
    built("cache", "--store", "a")

    assert built("cache", "--store", "a", "--remote", "/nowhere/at all")[0] == "cache: nothing to do"


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--push"], "--push needs --remote URL"),
        (["--remote", "https://me:secret@host/x", "--push"], "--push: https://host/x can only be read"),
        (["--remote", "remote"], "a directory is ./remote"),
        (["--remote", "s4://bucket/x"], "s4://bucket/x: Protocol not known"),
        (["--ray", "local", "--remote", "./remote"], "is another directory on every node"),
    ],
)
@pytest.mark.parametrize("command", ["all", "cache"])
def test_misuse_is_one_line(command: str, arguments: list[str], words: str) -> None:
    result = run("build", command, "tiny.toml", "--store", "b", *arguments)

    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "secret" not in result.output
    assert "Traceback" not in result.output


def test_a_check_pushes_nothing() -> None:
    result = run("build", "cache", "tiny.toml", "--store", "a", "--check", "--remote", "./remote", "--push")

    assert result.exit_code == 2
    assert "there is nothing to --push" in result.stderr


def test_a_capture_takes_the_same_options() -> None:
    assert "--push needs --remote" in run("build", "capture", "-o", "out", "--push", "--", "vllm").stderr
