"""The same trace and spec give the same tuned spec, byte for byte, and the same figures, in any process and any Python.

What could differ: the order of sets and of what is hashed, sums of floats (which Python adds otherwise since 3.12), and
random numbers. Each test tunes in a process that differs from this one in one thing.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.spec.parse import write_spec
from tests.environment import ROOT
from tests.specs import SMALL_CONFIG, spec_of

pytestmark = pytest.mark.process
ENVIRONMENTS = ROOT / ".venv" / "pythons"
LIMITS = {
    "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 512, "block_size": 16, "num_blocks": 120,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec and a trace; loaded so that requests wait, are preempted, and decode at once."""
    path = tmp_path_factory.mktemp("tuned")
    write_spec(path / "chat.toml", spec_of(config=SMALL_CONFIG, limits=LIMITS))
    draw = random.Random(0)
    rows, now = ["time,prompt_tokens,generated_tokens"], 0.0
    for _ in range(400):
        now += draw.random() / 37
        rows.append(f"{now!r},{1 + int(draw.random() ** 3 * 400)},{1 + int(draw.random() ** 2 * 80)}")
    (path / "trace.csv").write_text("\n".join(rows) + "\n")
    return path


def tuned(folder: Path, output: Path, *, python: Path = Path(sys.executable), **variables: str) -> list[str]:
    """Digests of everything that is written and printed, with queries of whole blocks and of other lengths."""
    digests = []
    for number, options in enumerate(((), ("--query-step", "5"))):
        spec = output / f"tuned{number}.toml"
        words = ["tune", "trace.csv", "--from", "chat.toml", "--entries", "23", "--load", "3", "--json"]
        done = subprocess.run(
            [str(python), "-m", "aotgaudi", *words, *options, "-o", str(spec)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **variables},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        digests += [hashlib.sha256(data).hexdigest() for data in (done.stdout, spec.read_bytes())]
    return digests


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = tuned(folder, tmp_path_factory.mktemp("expected"))
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize("seed", ["0", "1", "4294967295", "random"])
def test_hash_seed(folder: Path, expected: list[str], tmp_path: Path, seed: str) -> None:
    assert tuned(folder, tmp_path, PYTHONHASHSEED=seed) == expected


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_python_version(folder: Path, expected: list[str], tmp_path: Path, version: str) -> None:
    """Run ``bash ci/pythons`` once: it makes an environment for each Python that the machine has."""
    python = ENVIRONMENTS / version / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment of Python {version} (see ci/pythons)")

    assert tuned(folder, tmp_path, python=python, PYTHONNOUSERSITE="1") == expected
