"""The fake guest as tests run it: its command, its environment, its place."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from aotgaudi.bundle.launch import WarmUp
from aotgaudi.wrap.adapters.base import Address
from aotgaudi.wrap.exercise import ServerLimits, exercise, generation
from aotgaudi.wrap.file_watch import FileRules
from aotgaudi.wrap.session import Plan

SERVER = Path(__file__).with_name("fake_server.py")
LEFT_OUT = ("*.lock",)


def make_model(folder: Path, **config: object) -> Path:
    """A model directory, as far as the fake guest reads one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "fake", **config}))
    return folder


def smoke() -> WarmUp:
    return exercise("smoke", generation(ServerLimits()))


@dataclass(frozen=True)
class Fake:
    """One launch of the fake guest."""

    model: Path
    port: int
    faults: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return (
            *(sys.executable, str(SERVER), "serve", str(self.model)),
            *("--port", str(self.port), "--served-model-name", "m", *self.flags),
        )

    def plan(self, root: Path, *, phase: str, rules: FileRules | None = None) -> Plan:
        environment = {
            "PATH": os.defpath,
            "FAKE_CACHE_ROOT": str(root / "cache"),
            "TMPDIR": str(root / "tmp"),
            "FAKE_FAULTS": ",".join(self.faults),
        }
        if phase == "l":
            environment["FAKE_FORCE_LOAD"] = "1"
        return Plan(
            words=self.words,
            environment=environment,
            address=Address(port=self.port, served_name="m"),
            rules=rules or FileRules(root, left_out=LEFT_OUT),
        )

    def but(self, *faults: str) -> Fake:
        return replace(self, faults=faults)
