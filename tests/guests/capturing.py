"""Captures of the fake guest, for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from aotgaudi.bundle.launch import WarmUpLevel
from aotgaudi.store.store import Store
from aotgaudi.wrap.capture import Built, CaptureRequest, build_capture
from aotgaudi.wrap.collect import Rules
from aotgaudi.wrap.launch import ServerCommand, describe, find_server
from aotgaudi.wrap.prove import BuildContext
from tests.ports import free_port

SERVER = Path(__file__).with_name("fake_server.py")


class Told:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []
        self._heading = ""

    def begin(self, heading: str) -> None:
        self._heading = heading

    def note(self, text: str) -> None:
        pass

    def end(self, text: str) -> None:
        self.lines.append(f"{self._heading}: {text}")

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@dataclass
class Bench:
    """A directory with a model, a store and a place; and what a shell there would have."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    level: WarmUpLevel = "smoke"
    ready_seconds: float = 60.0
    told: Told = field(default_factory=Told)
    model_name: str = "model"

    def __post_init__(self) -> None:
        self.model.mkdir(parents=True, exist_ok=True)
        (self.model / "config.json").write_text('{"architectures": ["X"]}')
        self.environ = {
            **os.environ,
            "AOTGAUDI_FAKE_GUEST": "1",
            "AOTGAUDI_WITNESS_INTERVAL": "0.05",
            "OMP_NUM_THREADS": "1",
            **self.environ,
        }

    @property
    def model(self) -> Path:
        return self.folder / self.model_name

    def moved(self, model_name: str) -> Bench:
        """The same with the model in another directory."""
        return replace(self, model_name=model_name)

    @property
    def root(self) -> Path:
        return self.folder / "r"

    @property
    def store(self) -> Store:
        return Store.open(self.folder / "store")

    def words(self, *more: str) -> tuple[str, ...]:
        return (sys.executable, str(SERVER), "serve", str(self.model), "--port", str(free_port()), *more)

    def command(self, *options: str, out: str = "out") -> list[str]:
        """``aotgaudi build capture`` of the plain server."""
        places = {"-o": self.folder / out, "--root": self.root, "--store": self.folder / "store"}
        words = [word for name, path in places.items() for word in (name, str(path))]
        return ["build", "capture", *words, *options, "--", *self.words()]

    def found(self, *more: str, **environ: str) -> ServerCommand:
        return find_server(self.words(*more), {**self.environ, **environ})

    def order(self, *more: str, out: str = "out", **environ: str) -> CaptureRequest:
        found = self.found(*more, **environ)
        launch = describe(found, root=str(self.root), asked=self.level)
        return CaptureRequest(
            found=found, launch=launch, out=self.folder / out, ready_seconds=self.ready_seconds
        )

    def build(self, *more: str, out: str = "out", **environ: str) -> Built:
        return build_capture(self.order(*more, out=out, **environ), self.store, self.told)

    @contextmanager
    def setting(self, **environ: str) -> Iterator[BuildContext]:
        order = self.order(**environ)
        log: IO[Any]
        with (self.folder / "log").open("wb") as log:
            adapter, objects = order.found.adapter, self.store.objects
            rules = Rules(left_out=adapter.left_out, kind_of=adapter.kind_of)
            yield BuildContext(order.found, order.launch, objects, log, self.ready_seconds, self.told, rules)


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that know of `folder`, our own aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ, words = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in environ + words:
            found.append(words.replace(b"\0", b" ").decode("utf-8", "replace"))
    return found
