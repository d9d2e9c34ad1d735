"""The fake server in SGLang's dialect: its words, its variables, its plugins. What SGLang itself does needs a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.errors import CaptureError
from aotgaudi.store.store import Store
from aotgaudi.wrap.capture import Built, CaptureRequest, build_capture
from aotgaudi.wrap.launch import describe, shaped_command
from tests.environment import ROOT
from tests.guests.capturing import Told
from tests.guests_here import Here
from tests.ports import free_port

SERVER = """
import os, pathlib, runpy, sys
assert os.environ["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] in "01"
(pathlib.Path(os.environ["FAKE_LOG"]) / os.environ["SGLANG_JIT_DEEPGEMM_PRECOMPILE"]).touch()
os.environ["FAKE_CACHE_ROOT"] = os.environ["SGLANG_CACHE_DIR"]
os.environ["FAKE_PLUGINS_GROUP"] = "sglang.srt.plugins"
words = sys.argv[1:]
model = words[words.index("--model-path") + 1]
sys.argv = ["fake_server.py", "serve", model, *(w for w in words if w not in ("--model-path", model))]
runpy.run_path({fake!r}, run_name="__main__")
"""
FAKE = ROOT / "tests" / "guests" / "fake_server.py"


@pytest.fixture
def here(folder: Path) -> Here:
    """A package ``sglang`` whose server is the fake one."""
    found = Here(folder)
    found.install("sglang", "0.5.23")
    found.install("torch", "2.13.0+cpu", "torch/__init__.py,sha256=x,1\n")
    package = found.site / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER.replace("{fake!r}", repr(str(FAKE))))
    found.model()
    return found


def build(here: Here, **environ: str) -> Built:
    words = (sys.executable, "-m", "sglang.launch_server", "--model-path", str(here.folder / "tiny"))
    settings = {
        "PYTHONPATH": str(here.site),
        "FAKE_LOG": str(here.folder),
        "OMP_NUM_THREADS": "1",
        "AOTGAUDI_WITNESS_INTERVAL": "0.05",
    }
    given = shaped_command(
        (*words, "--port", str(free_port())), {**os.environ, **settings, **environ}, None, here.folder / "r"
    )
    launch = describe(given.found, root=str(here.folder / "r"), asked=given.asked("smoke"))
    order = CaptureRequest(given.found, launch, here.folder / "out", ready_seconds=120)
    return build_capture(order, Store.open(here.folder / "store"), Told())


def test_it_is_built_with_the_sweep_and_proved_without_it(here: Here) -> None:
    build(here)

    bundle = open_bundle(here.folder / "out")
    receipt, launch = bundle.require_capture(), bundle.launch
    assert launch.guest == "sglang"
    assert receipt.expected.roles == {"APIServer": 1, "Worker": 1}
    assert receipt.files
    assert all(file.path.startswith("cache/sglang/") for file in receipt.files)
    assert {path.name for path in here.folder.iterdir()} >= {"0", "1"}


def test_a_sweep_that_does_not_cover_what_is_asked_is_not_sealed(here: Here) -> None:
    with pytest.raises(CaptureError):
        build(here, FAKE_FAULTS="compile-live")

    assert not (here.folder / "out").exists()
