"""The guest of our own tests: a server of the standard library that compiles, or seems to. Found only where it is asked for.

It stands in for vLLM: its words are read, its variables counted and its command rewritten as vLLM's are; what differs is how
it is started and where its caches lie. See tests/guests/fake_server.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aotgaudi.backends.base import Target
from aotgaudi.bundle.capture_receipt import Expected
from aotgaudi.bundle.launch import GuestName, Launch
from aotgaudi.wrap.adapters.base import Environment, Phase, PlaceRoot, Repair
from aotgaudi.wrap.adapters.vllm import Vllm
from aotgaudi.wrap.command_line import one_integer
from aotgaudi.wrap.events import ProcessLog, expected_of
from aotgaudi.wrap.launch_machine import Installed, find_target
from aotgaudi.wrap.starts import STARTS
from aotgaudi.wrap.variables import Hashed, VariableRules

_LOADS = ("vllm.num_aot_artifacts_loaded",)
_ZEROS = ("vllm.num_aot_compiles",)
_ROOTS: Mapping[str, str] = {"FAKE_CACHE_ROOT": "cache/fake", "TMPDIR": "tmp"}
_NEUTRAL: Mapping[str, str] = {
    "FAKE_CACHE_ROOT": "where files are kept; set below the place's root",
    "FAKE_FORCE_LOAD": "set for each phase of a capture",
    "FAKE_FAULTS": "what a test has it do wrong",
    "FAKE_LOG_*": "logs",
}


class Fake(Vllm):
    """See the module."""

    name: GuestName = "fake"
    prefixes: tuple[str, ...] = ("FAKE_",)
    neutral_variables: Mapping[str, str] = _NEUTRAL
    hashed_variables: Mapping[str, Hashed] = {
        "FAKE_IMAGE_TAG": Hashed("which image this is"),
        "FAKE_POD_IP": Hashed("where other servers reach this one", is_of_pod=True),
    }
    repairs: tuple[Repair, ...] = ()
    hooks: tuple[str, ...] = ("audit", "vllm.counters")

    @property
    def variable_rules(self) -> VariableRules:
        """How its variables are told apart."""
        return VariableRules(self.prefixes, self.neutral_variables, self.hashed_variables)

    def starts_at(self, words: Sequence[str]) -> tuple[int, int] | None:
        """Returns where in a command it is started: ``python fake_server.py serve MODEL``."""
        return STARTS["fake"](words)

    def roots(self, place: PlaceRoot) -> dict[str, str]:
        """Returns the variables that name its caches, each with a path below the place's root."""
        return {name: place.below(below) for name, below in _ROOTS.items()}

    def environment(self, place: PlaceRoot, phase: Phase, environ: Mapping[str, str]) -> Environment:
        """Returns what its environment must be in a phase."""
        values = self.roots(place)
        if phase in ("load", "exercise", "live"):
            values["FAKE_FORCE_LOAD"] = "1"
        if phase == "cold":
            values["HOME"] = place.home
        return Environment(values, ("FAKE_FORCE_LOAD",) if phase in ("cold", "measure") else ())

    def target(self, installed: Installed) -> Target:
        """Returns this machine's CPU."""
        return find_target("cpu")

    def roles(self, launch: Launch) -> dict[str, int]:
        """Returns how many processes of each role must check in."""
        return {"APIServer": 1, "EngineCore": 1, "Worker": one_integer(launch.flags, "workers", 1)}

    def expected(self, launch: Launch, processes: Iterable[ProcessLog]) -> Expected:
        """Returns what every warm start must show, given what the processes reported in the proof; without the answers."""
        return expected_of(
            processes, roles=self.roles(launch), hooks=self.hooks, counted=_LOADS, zeros=_ZEROS
        )
