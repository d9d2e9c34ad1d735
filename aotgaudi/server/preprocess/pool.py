"""The preprocessor pool: other processes parse the bodies of requests, so that this never blocks the event loop.

::

    client -> event loop -> queue -> worker (a process): parse, validate, render, tokenize -> event loop -> engine

Each worker has a queue, which is first come, first served. Admission limits the queues (`aotgaudi.engine.admission`).
Several small requests are sent to a worker together, and it answers them in order. When a client leaves, its request is
taken out of the queue. If the worker already has the request, it still prepares it within its limits, and the answer is
dropped.

If a worker dies of a request, that request is refused. The fork server forks another worker, which gets the remaining
requests (`aotgaudi.server.preprocess.worker`). Once the server is ready, it starts no process itself.

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
import subprocess
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from aotgaudi import errors
from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.child import end
from aotgaudi.errors import AotGaudiError, RequestError, SpecError
from aotgaudi.runtime.guard import Seccomp
from aotgaudi.server.preprocess.prepare import Kind, PreparedRequest, ServedModel, TokenizeKind
from aotgaudi.server.preprocess.tokenizing import Tokenized
from aotgaudi.server.preprocess.worker import (
    GRAMMARS,
    LARGE_BODY_BYTES,
    LENGTHS_BYTES,
    MAX_PACKET_BYTES,
    WORKERS,
    Cause,
    Message,
    WorkerGoneError,
    WorkerLimits,
    grammar_in,
    lengths_of,
    message_of,
    prepared_of,
    question,
    tokenized_of,
)
from aotgaudi.server.spawn import spawn

logger = logging.getLogger(__name__)

DEFAULT_STALL_SECONDS = 60.0
_OPEN_SECONDS = 300.0
_CLOSE_SECONDS = 5.0
_MAX_SENT, _MAX_SENT_BYTES = 4, 64 << 10
"""Limits of what is sent together, to save turns of the event loop, which may be long. Larger requests are sent alone."""
_CHUNK_BYTES = 256 << 10
_MAX_LOST = 2


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
        answered = await self._queue(kind, raw).ask(kind, raw)
        grammar = grammar_in(answered)
        if grammar is not None:
            answered = await self._queues[GRAMMARS].ask(kind, raw, grammar)
        return prepared_of(answered)

    async def tokenize(self, kind: TokenizeKind, raw: bytes) -> Tokenized:
        """Returns the tokens or the text that `raw` asks for. Cancelling and errors are as for `prepare`."""
        return tokenized_of(await self._queue("chat", raw).ask(kind, raw))

    def _queue(self, kind: Kind, raw: bytes) -> WorkerQueue:
        return self._queues["large" if len(raw) > LARGE_BODY_BYTES else kind]

    def close(self) -> None:
        """Ends the fork server and its workers. Idempotent."""
        self._control.close()
        # Without workers it may still be loading.
        end(self._fork_server, _CLOSE_SECONDS if self._queues else 0)

    def __enter__(self) -> PreprocessorPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


@dataclass(slots=True, eq=False)
class _Job:
    """A request without an answer yet. `num_lost` counts the workers that ended while they prepared it.

    `grammar` is the parameter with the request's grammar, if a worker passed the request on because of it. From then on,
    only the grammar can be what is too slow or too large.
    """

    kind: Kind | TokenizeKind
    raw: bytes
    done: asyncio.Future[Message]
    grammar: str | None = None
    num_lost: int = 0

    def settle(self, answered: Message) -> None:
        """Passes on the worker's answer, if the client is still there."""
        if not self.done.done():
            self.done.set_result(answered)

    def refuse(self, error: RequestError) -> None:
        """Fails the request, if the client is still there."""
        if not self.done.done():
            self.done.set_exception(error)


class _Line:
    """A connection to a worker. One read may receive several answers; the buffer keeps the rest."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, bytearray()
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        """Sends all of `data`. Raises OSError."""
        await self._loop.sock_sendall(self._connection, data)

    async def answer(self) -> Message:
        """Waits for the next answer. Raises OSError if the worker dies or sends something that is not a message."""
        num_head_bytes, num_tail_bytes = lengths_of(await self._take(LENGTHS_BYTES))
        return message_of(await self._take(num_head_bytes), await self._take(num_tail_bytes))

    def close(self) -> None:
        self._connection.close()

    async def _take(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            received = await self._loop.sock_recv(self._connection, _CHUNK_BYTES)
            if not received:
                raise WorkerGoneError("the connection was closed")
            self._buffer += received
        taken = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return taken


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
        self._asked: deque[_Job] = deque()
        self._patience: asyncio.TimerHandle | None = None
        self.is_stuck = False
        self._line: _Line | None = None
        self._newest: socket.socket | None = None
        self._replacements: asyncio.Queue[tuple[socket.socket | None, Cause]] = asyncio.Queue()
        self._waiting: OrderedDict[_Job, None] = OrderedDict()
        self._has_come = asyncio.Event()

    async def ask(self, kind: Kind | TokenizeKind, raw: bytes, grammar: str | None = None) -> Message:
        """Returns the worker's answer.

        Raises:
            RequestError: 400 if the worker died of the request; 503 if there is no worker, or none that answers.
        """
        if self.is_stuck:
            raise _no_answer()
        job = _Job(kind, raw, asyncio.get_running_loop().create_future(), grammar)
        self._waiting[job] = None
        self._has_come.set()
        try:
            return await job.done
        finally:
            self._waiting.pop(job, None)

    def replace(self, connection: socket.socket | None, cause: Cause) -> None:
        """Takes a new worker's connection, or None if there will be no other, and why the previous worker ended."""
        if connection is not None:
            connection.setblocking(False)
            self._newest = connection
        elif self._newest is not None:
            with suppress(OSError):  # It may be closed already.
                self._newest.shutdown(
                    socket.SHUT_RDWR
                )  # The worker notices and ends, and so does our wait for it.
        self._replacements.put_nowait((connection, cause))

    async def run(self) -> None:
        """Sends waiting requests to the worker, for ever. If it ends, its unanswered requests go to the next worker."""
        while True:
            self._asked = await self._next()
            while self._asked:
                self._progress()
                await self._answer(self._asked)
            self._progress()

    async def _next(self) -> deque[_Job]:
        """Waits for requests, and returns those to send together."""
        while not self._waiting:
            self._has_come.clear()
            await self._has_come.wait()
        jobs, num_bytes = deque([self._waiting.popitem(last=False)[0]]), 0
        while self._waiting and len(jobs) < _MAX_SENT:
            num_bytes += len(jobs[-1].raw)
            if num_bytes + len(next(iter(self._waiting)).raw) > _MAX_SENT_BYTES:
                break
            jobs.append(self._waiting.popitem(last=False)[0])
        return jobs

    async def _answer(self, jobs: deque[_Job]) -> None:
        """Has one worker answer `jobs`, and removes those that it answers or dies of. Refuses all if no worker is left."""
        while not self._replacements.empty():  # The last worker ended while it was idle.
            await self._replaced()
        if self._line is None:
            for job in jobs:
                job.refuse(_no_worker())
            jobs.clear()
            return
        try:
            await self._line.send(b"".join(bytes(question(job.kind, job.raw)) for job in jobs))
            while jobs:
                answered = await self._in_time(self._line)
                jobs.popleft().settle(answered)
                self._progress()
                if answered.head.get("is_last"):
                    await self._replaced()
                    break
        except OSError:
            self._blame(jobs, await self._replaced())
        for job in [job for job in jobs if job.done.done()]:  # Refused, or its client has left.
            jobs.remove(job)

    async def _in_time(self, line: _Line) -> Message:
        deadline = asyncio.get_running_loop().call_later(self._kill_seconds, self._kill)
        try:
            return await line.answer()
        finally:
            deadline.cancel()

    def _progress(self) -> None:
        """Notes that a worker answered or was replaced, or that nobody waits, and begins to wait for the next answer."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience, self.is_stuck = None, False
        if self._asked:
            self._patience = asyncio.get_running_loop().call_later(self._stall_seconds, self._give_up)

    def _give_up(self) -> None:
        self.is_stuck = True
        logger.error("no request worker has answered for %g s: requests are refused", self._stall_seconds)
        for job in (*self._asked, *self._waiting):
            job.refuse(_no_answer())

    def _blame(self, jobs: deque[_Job], cause: Cause) -> None:
        """Refuses the request that the worker was preparing if it hit a limit, or if too many workers ended over it."""
        job = jobs[0]
        job.num_lost += 1
        if cause == "time":
            job.refuse(self._limits.too_slow(len(job.raw), job.grammar))
        elif cause == "memory":
            job.refuse(self._limits.too_large(job.grammar))
        elif job.num_lost >= _MAX_LOST:
            job.refuse(_no_worker())

    async def _replaced(self) -> Cause:
        """Waits for the worker's replacement, and returns why the worker ended."""
        if self._line is not None:
            self._line.close()
        connection, cause = await self._replacements.get()
        self._line = None if connection is None else _Line(connection)
        return cause


def _no_answer() -> RequestError:
    return RequestError(
        "The server could not read the request: its request workers do not answer", http_status=503
    )


def _no_worker() -> RequestError:
    return RequestError(
        "The server could not read the request: its preprocessor pool has died", http_status=503
    )
