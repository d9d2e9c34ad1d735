"""Remotes for tests: a file system of fsspec that fails as it is told, and a directory behind a read-only HTTP server."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from aotgaudi.share import remote as remote_module


@dataclass
class Place:
    """The files of a remote, by name, and how it behaves."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    """How long it takes to answer."""

    fault: Callable[[str, str], None] = lambda operation, name: None
    """Called with ``read``, ``size`` or ``write`` and the name, before an answer. Raises what the answer is to be."""

    answers: list[tuple[str, str]] = field(default_factory=list)
    """What it was asked: operation and name."""

    def names(self, kind: str) -> list[str]:
        """The names of its objects or records."""
        return sorted(name for name in self.files if name.startswith(kind))


class FaultyFiles(AbstractFileSystem):  # type: ignore[misc]
    """``faulty://NAME``: the files of a `Place`."""

    protocol = "faulty"
    cachable = False
    places: ClassVar[dict[str, Place]] = {}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._answer("read", path)[start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self._answer("size", path)), "type": "file"}

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        place, name = self._ask("write", path)
        place.files[name] = value

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no directories."""

    def _answer(self, operation: str, path: str) -> bytes:
        place, name = self._ask(operation, path)
        if name not in place.files:
            raise FileNotFoundError(path)
        return place.files[name]

    def _ask(self, operation: str, path: str) -> tuple[Place, str]:
        host, _, name = path.partition("/")
        place = self.places[host]
        place.answers.append((operation, name))
        time.sleep(place.seconds)
        place.fault(operation, name)
        return place, name


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A remote, where a call that failed is repeated at once."""
    monkeypatch.setattr(remote_module, "_RETRY_SECONDS", 0.0)
    with faulty_place("here") as place:
        yield place


@contextmanager
def faulty_place(name: str) -> Iterator[Place]:
    """Yields the remote ``faulty://NAME``."""
    fsspec.register_implementation("faulty", FaultyFiles, clobber=True)
    place = FaultyFiles.places[name] = Place(f"faulty://{name}")
    try:
        yield place
    finally:
        del FaultyFiles.places[name]


@contextmanager
def http_server(directory: Path) -> Iterator[str]:
    """Yields the URL of a server of the files in `directory`, which knows no ranges and takes nothing."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
