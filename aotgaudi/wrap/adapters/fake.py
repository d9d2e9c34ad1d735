"""The server of our own tests, which compiles or pretends to. Enabled only if AOTGAUDI_FAKE_GUEST is 1.

It stands in for vLLM: its command and its variables are read like vLLM's. It differs from vLLM in how it starts and where
its caches lie. See tests/guests/fake_server.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aotgaudi.commands.variables import Hashed, VariableRules
from aotgaudi.commands.words import one_integer
from aotgaudi.wrap.adapters.base import Phase
from aotgaudi.wrap.adapters.vllm import VLLM
from aotgaudi.wrap.launch_machine import find_target
from aotgaudi.wrap.starts import find_fake

_ROOTS: Mapping[str, str] = {"FAKE_CACHE_ROOT": "cache/fake", "TMPDIR": "tmp"}
_NEUTRAL: Mapping[str, str] = {
    "FAKE_CACHE_ROOT": "where files are kept; set below the sandbox's root",
    "FAKE_FORCE_LOAD": "set for each phase of a capture",
    "FAKE_FAULTS": "what a test has it do wrong",
    "FAKE_LOG_*": "logs",
}


def _settings(root: Path, phase: Phase, environ: Mapping[str, str]) -> dict[str, str | None]:
    return {"FAKE_FORCE_LOAD": None if phase in ("cold", "measure") else "1"}


FAKE = replace(
    VLLM,
    name="fake",
    starts_at=find_fake,
    variable_rules=VariableRules(
        ("FAKE_",),
        _NEUTRAL,
        {
            "FAKE_IMAGE_TAG": Hashed("which image this is"),
            "FAKE_POD_IP": Hashed("where other servers reach this one", is_of_pod=True),
        },
    ),
    cache_roots=_ROOTS,
    settings=_settings,
    repairs=(),
    hooks=("audit", "vllm.counters"),
    counted=("vllm.num_aot_artifacts_loaded",),
    zeros=("vllm.num_aot_compiles",),
    device=lambda _: "cpu",
    target=lambda _: find_target("cpu"),
    roles=lambda launch: {
        **VLLM.roles(launch),
        "Worker": one_integer(launch.flags, "workers", 1) * launch.world["data_parallel"],
    },
    variant=lambda _: None,
)
"""The fake server. Everything that is not said here is as in vLLM."""
