"""The preprocessor pool: other processes parse the bodies of requests, so that this never blocks the event loop.

::

    client -> event loop -> queue -> worker (a process): parse, validate, render, tokenize -> event loop -> engine

Each worker has a queue, which is first come, first served. Admission limits the queues (`aotgaudi.engine.admission`). When a
client leaves, its request is taken out of the queue. If the worker already has the request, it still prepares it within its
limits, and the answer is dropped.

If a worker dies, the request that it was preparing is refused, and the fork server forks another worker
(`aotgaudi.server.preprocess.worker`). Once the server is ready, it starts no process itself.

A worker that does not answer is killed and replaced. If none answers even so, because the fork server hangs as well, waiting
requests are refused, and the pool counts as stuck until a worker answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from aotgaudi import errors
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.child import end, spawn
from aotgaudi.errors import AotGaudiError, RequestError, SpecError
from aotgaudi.runtime.guard import Seccomp
from aotgaudi.server.preprocess.prepare import (
    AnswerT,
    Kind,
    PreparedRequest,
    ServedModel,
    Tokenized,
    TokenizeKind,
    answer_codec,
    answer_of_bytes,
)
from aotgaudi.server.preprocess.protocol import may_have_grammar
from aotgaudi.server.preprocess.worker import GRAMMAR, LAST, MAX_PACKET_BYTES, WORKERS, Cause, WorkerLimits

logger = logging.getLogger(__name__)

DEFAULT_STALL_SECONDS = 60.0
_NO_ANSWER, _NO_WORKER = "its request workers do not answer", "its preprocessor pool has died"
_OPEN_SECONDS = 300.0
_CLOSE_SECONDS = 5.0
_LARGE_BODY_BYTES = 64 * 1024
_LENGTH = struct.Struct("!i")
"""How `multiprocessing.connection.Connection` frames messages of less than 2 GiB."""
_MAX_ANSWER_BYTES = 128 << 20
_MAX_LOST = 2
"""A hanging worker is killed early enough for another one to answer before the pool counts as stuck."""


class PreprocessorPool:
    """The server's side of the workers. A context manager, which ends them.

    Call `load` and `open` once each, in this order, before there is an event loop. Call `attach` and all other methods on
    the event loop.
    """

    def __init__(self, workers: Mapping[str, WorkerLimits] = WORKERS, *, seccomp: Seccomp = "auto") -> None:
        """Starts the fork server and returns at once. Unless `seccomp` is off, the kernel lets it fork and nothing more."""
        self._fork_server, self._control = spawn(
            "aotgaudi.server.preprocess.worker", seccomp, kind=socket.SOCK_SEQPACKET
        )
        self._model_dir, self._limits = Path(), workers
        self._queues: dict[str, WorkerQueue] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: AotGaudiError | None = None

    def load(self, model: ModelDirectory, chat_template: Path | None = None) -> None:
        """Tells the fork server which model's tokenizer and chat template to load. Returns at once.

        `chat_template` is a file with the template; None stands for the model's template.
        """
        self._model_dir = model.path
        self._tell((model, chat_template))

    def open(self, model: ServedModel, stall_seconds: float = DEFAULT_STALL_SECONDS) -> None:
        """Waits until requests for `model` can be prepared. A queue is stuck after `stall_seconds` without progress.

        Raises:
            SpecError, CorruptError, UntrustedError: tokenizer or chat template cannot be used.
            AotGaudiError: the fork server has ended.
        """
        workers = {name: limits.for_model(model.max_len) for name, limits in self._limits.items()}
        self._queues = {
            name: WorkerQueue(limits, self._killer(name), stall_seconds) for name, limits in workers.items()
        }
        self._tell((model, workers))
        answer_codec()
        self._control.settimeout(_OPEN_SECONDS)
        for _ in self._queues:
            self._take_packet()
        self._control.setblocking(False)

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait for a worker, and none answers."""
        return any(queue.is_stuck for queue in self._queues.values())

    def attach(self) -> None:
        """Starts the queues on the running event loop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self._on_packet)
        self._tasks = [loop.create_task(queue.run()) for queue in self._queues.values()]

    async def prepare(self, kind: Kind, raw: bytes) -> PreparedRequest:
        """Returns the request of the body `raw`. Cancelling takes it out of the queue.

        Raises:
            RequestError: 400 or 404 if the body is wrong, or takes too much time or memory to prepare; 503 if the pool has
                died.
        """
        return await self._asked(PreparedRequest, kind, raw, "chat" if kind == "chat" else "completion")

    async def tokenize(self, kind: TokenizeKind, raw: bytes) -> Tokenized:
        """Returns the tokens or the text that `raw` asks for. Cancelling and errors are as for `prepare`."""
        return await self._asked(Tokenized, kind, raw, "chat")

    async def _asked(self, answer: type[AnswerT], kind: str, raw: bytes, worker: str) -> AnswerT:
        """Asks `worker`, or the slow one if the body is large or may have a grammar, which may occupy a worker fully."""
        is_slow = len(raw) > _LARGE_BODY_BYTES or may_have_grammar(raw)
        return answer_of_bytes(answer, await self._queues["slow" if is_slow else worker].ask(kind, raw))

    def close(self) -> None:
        """Ends the fork server and its workers. Idempotent."""
        self._control.close()
        # Without workers it may still be loading.
        end(self._fork_server, _CLOSE_SECONDS if self._queues else 0)

    def __enter__(self) -> PreprocessorPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _killer(self, name: str) -> Callable[[], None]:
        def kill() -> None:
            with suppress(OSError):  # The fork server is gone, and its workers with it.
                self._control.send(name.encode())

        return kill

    def _tell(self, value: object) -> None:
        try:
            self._control.send(pickle.dumps(value))
        except OSError:
            raise self._ended(_CLOSE_SECONDS) from None

    def _take_packet(self) -> None:
        """Handles the fork server's next packet. Waits for it if the socket is blocking."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        except TimeoutError as error:
            raise AotGaudiError(f"the preprocessor pool is not ready after {_OPEN_SECONDS:g} s") from error
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            raise self._ended(0 if self._tasks else _CLOSE_SECONDS)
        said: Mapping[str, Any] = json.loads(packet)
        if "error" in said:
            name, arguments = said["error"]
            raise getattr(errors, name)(*arguments)
        if "warning" in said:  # At the start, before the packets of workers.
            logger.warning("%s", said["warning"])
            self._take_packet()
            return
        self._queues[said["worker"]].replace(socket.socket(fileno=descriptors[0]), said["cause"])

    def _on_packet(self) -> None:
        """Handles packets of the fork server, or its end. Called on the event loop."""
        try:
            self._take_packet()
        except AotGaudiError as error:
            self.failure = error
            asyncio.get_running_loop().remove_reader(self._control)
            for queue in self._queues.values():
                queue.replace(None, "killed")
            logger.error("%s; restart the server", error)

    def _ended(self, wait_seconds: float) -> AotGaudiError:
        """Returns the error for the end of the fork server, after waiting for it at most `wait_seconds`."""
        try:
            code = self._fork_server.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return AotGaudiError("the preprocessor pool has died")
        if code == -signal.SIGPROF:
            return SpecError(str(self._model_dir), "its tokenizer and chat template take too long to load")
        return AotGaudiError(f"the preprocessor pool has died (exit status {code})")


class WorkerQueue:
    """The requests that wait for one worker. May be created anywhere; use it on the event loop."""

    def __init__(
        self,
        limits: WorkerLimits,
        kill: Callable[[], None],
        stall_seconds: float = DEFAULT_STALL_SECONDS,
    ) -> None:
        """`kill` ends a worker that does not answer. It is called early enough for another try within `stall_seconds`."""
        self._limits, self._kill, self._stall_seconds = limits, kill, stall_seconds
        self._kill_seconds = min(limits.wall_seconds, stall_seconds / _MAX_LOST)
        self.is_stuck = False
        self._stall: asyncio.TimerHandle | None = None
        self._newest: socket.socket | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._replacements: asyncio.Queue[tuple[socket.socket | None, Cause]] = asyncio.Queue()
        self._waiting: dict[asyncio.Future[bytes], bytes] = {}
        self._asked: asyncio.Future[bytes] | None = None
        self._has_come = asyncio.Event()

    async def ask(self, kind: str, raw: bytes) -> bytes:
        """Returns the worker's answer to the body `raw`.

        Raises:
            RequestError: 400 if the worker hit a limit; 503 if it died of something else, or there is none that answers.
        """
        if self.is_stuck:
            raise _unread(_NO_ANSWER)
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[done] = b"%s\0%s" % (kind.encode(), raw)
        self._has_come.set()
        try:
            return await done
        finally:
            self._waiting.pop(done, None)

    def replace(self, connection: socket.socket | None, cause: Cause) -> None:
        """Takes a new worker's connection, or None if there will be no other, and why the previous worker ended."""
        if connection is None and self._newest is not None:
            with suppress(OSError):  # It may be closed already.
                self._newest.shutdown(socket.SHUT_RDWR)  # The worker ends, and so does our wait for it.
        self._newest = connection
        self._replacements.put_nowait((connection, cause))

    async def run(self) -> None:
        """Asks the worker one waiting request after another, for ever."""
        while True:
            while not self._waiting:
                self._has_come.clear()
                await self._has_come.wait()
            self._asked = next(iter(self._waiting))
            self._watch()
            await self._answer(self._asked, self._waiting.pop(self._asked))
            self._asked = None
            self._watch()

    async def _answer(self, done: asyncio.Future[bytes], question: bytes) -> None:
        while not self._replacements.empty():  # The last worker ended while it was idle.
            await self._replaced()
        if self._streams is None:
            _settle(done, _unread(_NO_WORKER))
            return
        grammars: list[str] = []
        deadline = asyncio.get_running_loop().call_later(self._kill_seconds, self._kill)
        try:
            mark, answer = await self._exchange(*self._streams, question, grammars)
        except (OSError, EOFError):
            cause = await self._replaced()
            _settle(done, self._refusal(cause, len(question), *grammars))
        else:
            _settle(done, answer)
            if mark == LAST:
                await self._replaced()
        finally:
            deadline.cancel()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        question: bytes,
        grammars: list[str],
    ) -> tuple[bytes, bytes]:
        """Returns the mark and the rest of the worker's answer. Raises OSError or EOFError if the worker dies.

        `grammars` gets the parameter whose grammar the worker begins to check.
        """
        writer.writelines((_LENGTH.pack(len(question)), question))
        await writer.drain()
        while True:
            (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if not 0 < size <= _MAX_ANSWER_BYTES:
                raise EOFError
            message = await reader.readexactly(size)
            if message[:1] != GRAMMAR:
                return message[:1], message[1:]
            grammars[:] = [message[1:].decode(errors="replace")]

    def _watch(self) -> None:
        """Notes that the worker was asked or has answered, and begins to wait for its answer, if it was asked."""
        if self._stall is not None:
            self._stall.cancel()
        self._stall, self.is_stuck = None, False
        if self._asked is not None:
            self._stall = asyncio.get_running_loop().call_later(self._stall_seconds, self._give_up)

    def _give_up(self) -> None:
        self.is_stuck = True
        logger.error("no request worker has answered for %g s: requests are refused", self._stall_seconds)
        for done in (self._asked, *self._waiting):
            if done is not None:
                _settle(done, _unread(_NO_ANSWER))

    def _refusal(self, cause: Cause, num_bytes: int, grammar: str | None = None) -> RequestError:
        """Returns why the request of which the worker died is refused. `grammar` is as for `WorkerLimits.too_slow`."""
        if cause == "time":
            return self._limits.too_slow(num_bytes, grammar)
        if cause == "memory":
            return self._limits.too_large(grammar)
        return _unread(_NO_WORKER if self._streams is None else "the worker that prepared it was ended")

    async def _replaced(self) -> Cause:
        """Waits for the worker's replacement, and returns why the worker ended."""
        if self._streams is not None:
            self._streams[1].close()
        connection, cause = await self._replacements.get()
        self._streams = None
        if connection is not None:
            self._streams = await asyncio.open_unix_connection(sock=connection)
        return cause


def _settle(done: asyncio.Future[bytes], outcome: bytes | RequestError) -> None:
    """Passes on the outcome of a request, if its client is still there."""
    if done.done():
        return
    if isinstance(outcome, RequestError):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


def _unread(why: str) -> RequestError:
    return RequestError(f"The server could not read the request: {why}", http_status=503)
