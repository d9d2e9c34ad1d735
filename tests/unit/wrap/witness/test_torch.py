"""The hooks on torch, with the torch that is installed: a function is compiled in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.wrap.witness import SITE
from tests.unit.wrap.witness.guest import Guest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

COMPILE = f"""
import sys; sys.path.insert(0, {str(SITE)!r})
import aotgaudi_witness; aotgaudi_witness.register()
import torch

def doubled(x):
    return x * 2 + 1

print(torch.compile(doubled)(torch.ones(3)).sum().item())
"""


def compile_function(guest: Guest, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "guest.py"
    script.write_text(COMPILE)
    environment = {
        **guest.environment,
        "HOME": os.environ.get("HOME", "/root"),
        "TMPDIR": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(guest.root),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_torch_is_seen_to_trace_to_generate_and_to_compile_once(guest: Guest, tmp_path: Path) -> None:
    """The second time everything comes from the cache: Dynamo traces, and that is all."""
    cold = compile_function(guest, tmp_path)
    assert cold.stdout == "9.0\n", cold.stderr
    (trace,) = guest.events("trace")
    assert trace["name"].endswith("guest.py:6 doubled")
    assert [event["what"] for event in guest.events("generate")] == ["inductor"]
    assert [e["what"] for e in guest.events("process") if e["what"] == "compiler"] != []
    assert guest.events("write") != []
    assert guest.events("fault") == []

    for file in guest.files():
        file.unlink()
    guest.state.write_text("l")
    allowed = guest.place / "allowed"
    allowed.write_text("\n".join(str(path) for path in guest.root.rglob("*") if path.is_file()))
    warm = compile_function(guest, tmp_path)

    assert warm.stdout == "9.0\n", warm.stderr
    assert len(guest.events("trace")) == 1
    assert guest.events("generate") == guest.events("refused") == []
    assert [e for e in guest.events("process") if e["what"] == "compiler"] == []
    counted = {name: value for event in guest.events("counters") for name, value in event["values"].items()}
    assert counted["torch.inductor.fxgraph_cache_hit"] == 1


def test_torch_is_kept_from_generating_where_nothing_may_compile(guest: Guest, tmp_path: Path) -> None:
    guest.state.write_text("l")

    done = compile_function(guest, tmp_path)

    assert done.returncode == 1
    assert "aotgaudi: refused: code generation by Inductor" in done.stderr
    assert list(guest.root.rglob("*.so")) == []
