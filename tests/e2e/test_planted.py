"""Python files in the working directory, in a model and in a bundle are never run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from aotgaudi.child import python_command
from tests.e2e.harness import Server, Workplace, copy_bundle, environment
from tests.planted import plant

pytestmark = pytest.mark.slow


def serve(here: Path, *options: str | Path) -> Server:
    """A server that is started in the directory `here`, by a command that does not look there."""
    words = ("serve", "--port", "0", "--drain-delay", "0", *map(str, options))
    return Server(python_command("aotgaudi.cli.main", *words), environment(here.parent / "cache"), here)


def test_those_of_the_model_are_not(workplace: Workplace, tmp_path: Path) -> None:
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    found = plant(model, tmp_path / "found")

    with serve(model, "--model", ".", "--bundle", workplace.bundle, "--require-warm") as server:
        server.complete("the fox", max_tokens=2)
        assert server.metric("aotgaudi_compilations_total") == 0

    assert not list(found.iterdir())


def test_those_of_the_bundle_are_not_and_it_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "e2e.bundle")
    found = plant(bundle, tmp_path / "found")
    words = ("serve", "--port", "0", "--bundle", ".", "--model", str(workplace.model), "--require-warm")

    done = subprocess.run(
        python_command("aotgaudi.cli.main", *words),
        env=environment(tmp_path / "cache"), cwd=bundle, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 4
    assert "not in the index" in done.stderr
    assert not list(found.iterdir())


def test_those_of_the_working_directory_are_not_by_builders_either(
    workplace: Workplace, holed_bundle: Path, holed_store: Path, tmp_path: Path
) -> None:
    here, store = tmp_path / "here", shutil.copytree(holed_store, tmp_path / "store")
    here.mkdir()
    found = plant(here, tmp_path / "found")

    with serve(here, "--bundle", holed_bundle, "--model", workplace.model, "--store", store) as server:
        server.complete([17] * 20, max_tokens=8, ignore_eos=True)
        assert server.metric("aotgaudi_compilations_total") == 1

    assert not list(found.iterdir())
