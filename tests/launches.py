"""Launches for tests, of a machine and a server that are not there."""

from __future__ import annotations

from typing import Any

from aotgaudi.backends.base import Target
from aotgaudi.bundle.launch import Launch, ModelIdentity, Place, world
from aotgaudi.digest import Digest
from aotgaudi.wrap.exercise import ServerLimits, exercise, generation

WORDS = ("/opt/venv/bin/vllm", "serve", "/models/tiny", "--max-model-len", "512", "--port", "8000")


def a_launch(**changes: Any) -> Launch:
    """Returns a launch of vLLM on a CPU, with `changes` made to its members."""
    members: dict[str, Any] = {
        "guest": "vllm",
        "words": WORDS,
        "flags": {"max-model-len": "512"},
        "variables": {"VLLM_CPU_KVCACHE_SPACE": "1"},
        "model": ModelIdentity(name="/models/tiny", files={"config.json": Digest.of(b"{}")}),
        "software": {"python": "3.12.3 cpython-312-x86_64-linux-gnu", "vllm": f"0.32.0 {'ab' * 32}"},
        "target": Target(backend="cpu", machine="x86_64", isa=("avx2", "fma")),
        "world": world({}),
        "place": Place(
            root="/run/aotgaudi",
            prefix="/opt/venv",
            site_packages="/opt/venv/lib/python3.12/site-packages",
            variables={"VLLM_IMAGE_TAG": "v7"},
        ),
        "exercise": exercise("smoke", generation(ServerLimits())),
        "repairs": ("vllm.finalize-loading",),
    }
    return Launch(**{**members, **changes})
