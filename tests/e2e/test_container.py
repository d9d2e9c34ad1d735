"""A strict server in a container that may write nowhere and does not know its user."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container import contained
from tests.e2e.harness import Server, Workplace, copy_bundle

pytestmark = pytest.mark.slow


@pytest.fixture
def mounted(workplace: Workplace) -> Iterator[Path]:
    """The bundle and the model where everybody may read them, owned by root."""
    with tempfile.TemporaryDirectory(prefix="aotgaudi-container-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        copy_bundle(workplace.bundle, folder / "bundle")
        shutil.copytree(workplace.model, folder / "model")
        for path in (folder / "model", *(folder / "model").rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder


def test_serving_with_an_arbitrary_uid_no_home_and_nothing_writable(
    workplace: Workplace, mounted: Path
) -> None:
    options = ["--bundle", mounted / "bundle", "--model", mounted / "model", "--port", "0", "--require-warm"]
    command = [sys.executable, "-m", "aotgaudi", "serve", *map(str, options)]

    with Server(contained(command, {"OMP_NUM_THREADS": "1"}), {}, workplace.folder) as server:
        assert server.complete("the quick", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert server.metric("aotgaudi_compilations_total") == 0
