"""Paths of all kinds, for the store, the bundle, the model, TMPDIR and HOME, over build, verify and serve.

That units compile in such places, and to the same bytes, is in tests/integration/test_same_bytes.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.harness import Server, Workplace, command_line, environment

pytestmark = pytest.mark.slow


def deep(folder: Path, length: int) -> Path:
    """A folder whose path has so many characters."""
    while len(str(folder)) < length - 201:
        folder /= "d" * 200
    return folder / ("e" * (length - len(str(folder)) - 1))


def run(place: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    changes = {"TMPDIR": str(place / "tmp"), "HOME": str(place)}
    return subprocess.run(
        command_line(*arguments),
        cwd=place,
        env=environment(place / "cache", **changes),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@contextmanager
def furnished(workplace: Workplace, place: Path) -> Iterator[Path]:
    (place / "tmp").mkdir(parents=True)
    shutil.copytree(workplace.model, place / "model")
    shutil.copy(workplace.spec, place / "x.toml")
    yield place


@pytest.mark.parametrize("name", ['-sp ace ünï 日本\nit\'s "a" \\ $b,c:d=e;#%', ""], ids=ascii)
def test_a_path_may_have_any_character_and_3000_of_them(
    workplace: Workplace, tmp_path: Path, name: str
) -> None:
    with furnished(workplace, tmp_path / name if name else deep(tmp_path, 3_000)) as place:
        built = run(
            place, "build", "x.toml", "-o", "-b", "--store", "-store", "--lower", workplace.store, "-j", "1"
        )
        assert built.returncode == 0, built.stderr
        verified = run(place, "verify", place / "-b")
        assert verified.returncode == 0, verified.stderr

        options = ("--bundle", "-b", "--model", place / "model", "--port", "0", "--require-warm")
        changes = {"TMPDIR": str(place / "tmp"), "HOME": str(place)}
        command = command_line("serve", *options, "--drain-delay", "0")
        with Server(command, environment(place / "cache", **changes), place) as server:
            assert server.complete("the quick", max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "words",
    [
        "build {spec} -o {deep}/b --store {store}",
        "build {spec} -o {folder}/b --store {deep}/s",
        "verify {deep}/b",
        "serve --bundle {deep}/b --model {model}",
        "serve --bundle {bundle} --model {deep}/model",
    ],
)
def test_a_path_of_4000_characters_is_refused_in_a_line(
    workplace: Workplace, tmp_path: Path, words: str
) -> None:
    known = {
        "spec": workplace.spec,
        "model": workplace.model,
        "store": workplace.store,
        "bundle": workplace.bundle,
        "folder": tmp_path,
        "deep": deep(tmp_path, 4_090),
    }

    done = run(tmp_path, *words.format_map(known).split())

    assert done.returncode in (2, 4)
    (line,) = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    assert len(line) < 2_200
    assert "Traceback" not in done.stderr
