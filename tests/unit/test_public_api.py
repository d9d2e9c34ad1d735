"""What `import aotgaudi` offers: lazily, so that it costs nothing, and by the names that are documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import aotgaudi
from aotgaudi.errors import StoreError


@pytest.mark.parametrize("name", aotgaudi.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(aotgaudi, name) is not None


@pytest.mark.process
def test_build_is_the_function_whatever_was_imported_before() -> None:
    code = "import aotgaudi.compile.plan, aotgaudi; from aotgaudi.compile import plan; print(aotgaudi.build.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "aotgaudi.compile.pipeline\n"


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="'aotgaudi' has no attribute 'serve_me'"):
        aotgaudi.serve_me  # noqa: B018


@pytest.mark.process
def test_importing_it_imports_nothing_else() -> None:
    code = "import sys, aotgaudi; print([m for m in sys.modules if m.startswith(('aotgaudi.', 'torch', 'pydantic'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


@pytest.mark.process
def test_opening_a_bundle_needs_no_torch() -> None:
    code = "import sys, aotgaudi; aotgaudi.open_bundle; print({'torch', 'numpy', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


def test_a_place_without_a_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no bundle at"):
        aotgaudi.open_bundle(str(tmp_path))
