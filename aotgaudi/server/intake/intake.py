"""The intake: other processes that read what clients send, so that the event loop never waits for it.

::

    client -> event loop -> lane's queue -> lane (a process): parse, validate, render, tokenize -> event loop -> engine

A companion process is started before the model is loaded, loads tokenizer and chat template meanwhile, and forks the lanes
(`aotgaudi.server.intake.companion`). A lane works under limits of time and memory (`aotgaudi.server.intake.lane`); one that
dies of a request is forked again, by the companion, and the request is refused. From ready on the server itself starts no
process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from aotgaudi import errors
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.errors import AotGaudiError, SpecError
from aotgaudi.runtime.guard import Seccomp
from aotgaudi.server.intake.lane import LANES, LARGE_BODY_BYTES, LaneLimits
from aotgaudi.server.intake.prepare import Kind, PreparedRequest, ServedModel
from aotgaudi.server.intake.queue import LaneQueue, Replacement
from aotgaudi.server.intake.wire import ANSWER_FOR_KERNEL, MAX_PACKET_BYTES
from aotgaudi.server.spawn import spawn

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 300.0
_CLOSE_SECONDS = 5.0


class Intake:
    """The companion and its lanes, as the server sees them. A context manager, which ends them.

    `load` and `open` are called once each, in this order, before there is an event loop; `attach`, and what comes after it,
    on the event loop.
    """

    def __init__(self, lanes: Mapping[str, LaneLimits] = LANES, *, seccomp: Seccomp = "auto") -> None:
        """Starts the companion, and returns at once. Unless `seccomp` is off, the kernel keeps it to forking."""
        self._companion, self._control = spawn(
            "aotgaudi.server.intake.companion", seccomp, kind=socket.SOCK_SEQPACKET
        )
        self._model_dir, self._limits = Path(), lanes
        self._lanes: dict[str, LaneQueue] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.is_alive = True

    def load(self, model: ModelDirectory) -> None:
        """Tells the companion which model's tokenizer and chat template to load. Returns at once."""
        self._model_dir = model.path
        self._tell(model)

    def open(self, model: ServedModel) -> None:
        """Waits until requests for `model` can be prepared.

        Raises:
            SpecError, CorruptError, UntrustedError: tokenizer or chat template cannot be used.
            AotGaudiError: the companion has ended.
        """
        lanes = {name: limits.for_model(model.max_len) for name, limits in self._limits.items()}
        self._lanes = {name: LaneQueue(limits, self._killer(name)) for name, limits in lanes.items()}
        self._tell((model, lanes))
        self._control.settimeout(_OPEN_SECONDS)
        for _ in self._lanes:
            self._take_packet()
        self._control.setblocking(False)

    def answer_for_kernel(self, listener: int, counter: int) -> None:
        """Has the companion refuse and count what the kernel asks it about. Is a `HandOver`; to be called once, opened."""
        socket.send_fds(self._control, [ANSWER_FOR_KERNEL], [listener, counter])

    def attach(self) -> None:
        """Begins to work, on the running event loop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self._on_packet)
        self._tasks = [loop.create_task(lane.run()) for lane in self._lanes.values()]

    async def prepare(self, kind: Kind, raw: bytes) -> PreparedRequest:
        """Returns what the body `raw` asks for. Cancelling it takes it out of the queue.

        Raises:
            RequestError: 400 or 404 for what is wrong with the body, also if preparing it takes too much time or memory;
                503 if the intake has ended.
        """
        name = "large" if len(raw) > LARGE_BODY_BYTES else kind
        return await self._lanes[name].prepare(kind, raw)

    def close(self) -> None:
        """Ends the companion and its lanes. Idempotent."""
        self.is_alive = False
        self._control.close()
        if not self._lanes:  # It has not forked any; it need not load to the end.
            self._companion.kill()
        try:
            self._companion.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._companion.kill()
            self._companion.wait()

    def __enter__(self) -> Intake:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _killer(self, name: str) -> Callable[[], None]:
        def kill() -> None:
            with suppress(OSError):  # The companion is gone, and its lanes go with it.
                self._control.send(name.encode())

        return kill

    def _tell(self, value: object) -> None:
        try:
            self._control.send(pickle.dumps(value))
        except OSError:
            raise self._ended(_CLOSE_SECONDS) from None

    def _take_packet(self) -> None:
        """Takes one of the companion's packets, which is there, or is waited for."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        except TimeoutError as error:
            raise AotGaudiError(f"the intake is not ready after {_OPEN_SECONDS:g} s") from error
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            raise self._ended(0 if self._tasks else _CLOSE_SECONDS)
        said: Mapping[str, Any] = json.loads(packet)
        if "error" in said:
            name, arguments = said["error"]
            raise getattr(errors, name)(*arguments)
        self._lanes[said["lane"]].replace(Replacement(socket.socket(fileno=descriptors[0]), said["cause"]))

    def _on_packet(self) -> None:
        """Called on the event loop when the companion has said something, or has ended."""
        try:
            self._take_packet()
        except AotGaudiError as error:
            self.is_alive = False
            asyncio.get_running_loop().remove_reader(self._control)
            for lane in self._lanes.values():
                lane.replace(Replacement(None, "killed"))
            logger.error("%s; restart the server", error)

    def _ended(self, wait_seconds: float) -> AotGaudiError:
        """Returns the error that the companion's end stands for."""
        try:
            code = self._companion.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return AotGaudiError("the intake has ended")
        if code == -signal.SIGPROF:
            return SpecError(str(self._model_dir), "its tokenizer and chat template take too long to load")
        return AotGaudiError(f"the intake has ended (exit status {code})")
