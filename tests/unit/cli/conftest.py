"""Commands run in the process of the tests, which may not give its rights away for good."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.cli.serve import API_KEY_VARIABLES
from aotgaudi.phases import Phases
from aotgaudi.server.engine.channel import Begin
from aotgaudi.server.launch import ServeOptions
from tests.command import keep_rights


@pytest.fixture(autouse=True)
def _rights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rights(monkeypatch)


def model_directory(path: Path) -> Path:
    """A directory that looks like a model's; nothing of it is read."""
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes(b"")
    return path


class NoProcess:
    """In the place of the engine's."""

    pid = 0

    def __init__(self, _: float) -> None:
        self.told: list[Begin] = []

    def begin(self, begin: Begin) -> None:
        self.told.append(begin)

    def __enter__(self) -> NoProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started, and no log is written."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # Nothing is set where a user has set this.
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr("aotgaudi.server.engine.start.EngineProcess", NoProcess)
    monkeypatch.setattr("aotgaudi.bundle.kind.is_capture", lambda _: False)


@dataclass
class Started:
    """What a server was started with; `options` is None while none was."""

    options: Any = None
    begin: Any = None
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def started(no_process: None, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The options come to a server that is not started."""
    del no_process
    found = Started()

    def launched(options: ServeOptions, process: NoProcess, _: Phases) -> None:
        found.options, (found.begin,), found.environment = options, process.told, dict(os.environ)

    for name in API_KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("aotgaudi.server.launch.launch", launched)
    return found
