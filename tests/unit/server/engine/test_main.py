"""Torch's library on another thread: there before torch is imported, and torch is what it is without."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from aotgaudi.server.engine import main

CODE = """
import sys
from pathlib import Path
from aotgaudi.server.engine.main import begin_to_load_torch

thread = begin_to_load_torch()
thread.join()
assert "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
assert "torch" not in sys.modules
import torch
torch.set_num_threads(2)
assert float((torch.ones(64, 64) @ torch.ones(64, 64)).sum()) == 64.0**3
assert Path("/proc/self/maps").read_text().count("libtorch_cpu.so") < 16, "it is there twice"
"""


@pytest.mark.process
def test_torch_imports_over_the_library_that_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "spec", [None, ModuleSpec("torch", None), ModuleSpec("torch", None, origin="/nowhere/x.py")]
)
def test_where_torch_is_not_nothing_begins(monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None) -> None:
    monkeypatch.setattr(main, "find_spec", lambda name: spec)

    assert main.begin_to_load_torch() is None


@pytest.mark.process
def test_a_process_that_ends_meanwhile_ends_as_it_says() -> None:
    code = "from aotgaudi.server.engine.main import begin_to_load_torch; begin_to_load_torch(); raise SystemExit(3)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


WITHOUT_TRACING = """
import sys
from aotgaudi.server.engine.main import leave_out_tracing

leave_out_tracing()
import torch
assert not {"torch._decomp", "torch._export", "torch.export.exported_program"} & set(sys.modules)
assert float((torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)).sum()) == 64.0**3
assert torch.empty(2, 3, device="meta").t().shape == (3, 2)
"""


@pytest.mark.process
def test_torch_runs_without_what_only_tracing_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRACING],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr


def test_nothing_is_left_out_of_a_torch_that_is_there_already() -> None:
    import torch.export as before

    main.leave_out_tracing()

    assert sys.modules["torch.export"] is before
