"""The fake guest as tests run it: its command, its environment, its place."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

SERVER = Path(__file__).with_name("fake_server.py")


def make_model(folder: Path, **config: object) -> Path:
    """A model directory, as far as the fake guest reads one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "fake", **config}))
    return folder


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

    def but(self, *faults: str) -> Fake:
        return replace(self, faults=faults)
