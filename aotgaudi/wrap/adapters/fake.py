"""The server of our own tests, which compiles or pretends to. Enabled only if AOTGAUDI_FAKE_GUEST is 1.

It stands in for vLLM: its command and its variables are read like vLLM's. It differs from vLLM in how it starts and where
its caches lie. See tests/guests/fake_server.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from aotgaudi.backends.base import Target
from aotgaudi.bundle.launch import GuestName, Launch
from aotgaudi.commands.variables import Hashed, VariableRules
from aotgaudi.commands.words import one_integer
from aotgaudi.wrap.adapters.base import Environment, Phase, Repair, SandboxRoot
from aotgaudi.wrap.adapters.vllm import Vllm
from aotgaudi.wrap.launch_machine import Installed, find_target

_ROOTS: Mapping[str, str] = {"FAKE_CACHE_ROOT": "cache/fake", "TMPDIR": "tmp"}
_NEUTRAL: Mapping[str, str] = {
    "FAKE_CACHE_ROOT": "where files are kept; set below the sandbox's root",
    "FAKE_FORCE_LOAD": "set for each phase of a capture",
    "FAKE_FAULTS": "what a test has it do wrong",
    "FAKE_LOG_*": "logs",
}


class Fake(Vllm):
    """The fake server. See `base.Adapter`; everything else is as in vLLM."""

    name: GuestName = "fake"
    family: str = "fake"
    variable_rules: VariableRules = VariableRules(
        ("FAKE_",),
        _NEUTRAL,
        {
            "FAKE_IMAGE_TAG": Hashed("which image this is"),
            "FAKE_POD_IP": Hashed("where other servers reach this one", is_of_pod=True),
        },
    )
    repairs: tuple[Repair, ...] = ()
    hooks: tuple[str, ...] = ("audit", "vllm.counters")
    cache_roots: Mapping[str, str] = _ROOTS
    counted: tuple[str, ...] = ("vllm.num_aot_artifacts_loaded",)
    zeros: tuple[str, ...] = ("vllm.num_aot_compiles",)

    def environment(self, root: SandboxRoot, phase: Phase, environ: Mapping[str, str]) -> Environment:
        """Returns the server's environment in a phase."""
        values = self.roots(root)
        if phase in ("load", "exercise", "live"):
            values["FAKE_FORCE_LOAD"] = "1"
        if phase == "cold":
            values["HOME"] = root.home
        return Environment(values, ("FAKE_FORCE_LOAD",) if phase in ("cold", "measure") else ())

    def target(self, installed: Installed) -> Target:
        """Returns this machine's CPU."""
        return find_target("cpu")

    def roles(self, launch: Launch) -> dict[str, int]:
        """Returns how many processes of each role must check in."""
        return {"APIServer": 1, "EngineCore": 1, "Worker": one_integer(launch.flags, "workers", 1)}
