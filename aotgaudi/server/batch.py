"""Answers a file of requests (a batch) by passing each through the server's own application, without a socket.

So answers and refusals are those of the server. Just enough requests are in flight to keep the engine busy. Only these are
in memory, not the rest of either file.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from aotgaudi.errors import AotGaudiError, SpecError
from aotgaudi.phases import Phases
from aotgaudi.server.app import create_app
from aotgaudi.server.batch_files import AnswerFile, BatchAnswer, BatchRequest, RequestFile
from aotgaudi.server.boundary import HEADER
from aotgaudi.server.engine.start import EngineProcess
from aotgaudi.server.http import error_body
from aotgaudi.server.launch import StartOptions, start_service
from aotgaudi.server.preprocess.pool import PreprocessorPool
from aotgaudi.server.service import Service

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SPARE_REQUESTS = 16
_TICK_SECONDS = 0.5
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """Progress of a batch: answered requests, their total number, how many answers are errors, and tokens generated."""

    num_done: int
    num_total: int
    num_errors: int
    num_tokens: int
    seconds: float


OnProgress = Callable[[BatchProgress], None]
"""Called several times a second, on the event loop."""


def run_batch(
    options: StartOptions,
    process: EngineProcess,
    phases: Phases,
    requests: RequestFile,
    answers: AnswerFile,
    on_progress: OnProgress,
) -> BatchProgress:
    """Answers the requests that have no answer yet. `process` is the engine's, which is already starting.

    Raises:
        AotGaudiError: as `aotgaudi.server.launch.launch`, or the engine has died or is stuck.
        SpecError: the existing answers come from another bundle.
        KeyboardInterrupt: SIGINT or SIGTERM. Answers that were complete by then are written.
    """
    with PreprocessorPool(seccomp=options.seccomp) as preprocessor:
        service, engine = start_service(options, process, preprocessor, phases)
        logger.info("%s", options.threads)
        check_fingerprints(answers, service.fingerprint)
        gc.freeze()
        gc.enable()

        async def run() -> BatchProgress:
            engine.attach()
            preprocessor.attach()
            try:
                return await Batch(service, requests, answers, on_progress).run()
            finally:
                await _end(service)

        try:
            return asyncio.run(run())
        except _StoppedError:
            raise KeyboardInterrupt from None


class _StoppedError(Exception):
    """A signal says to stop. Stays in this module. Used because KeyboardInterrupt does not pass asyncio cleanly."""


def check_fingerprints(answers: AnswerFile, fingerprint: str) -> None:
    """Raises SpecError if the file already has answers of another bundle."""
    if answers.fingerprints - {fingerprint}:
        raise SpecError(
            str(answers.path),
            f"has answers of {', '.join(sorted(answers.fingerprints))}; this bundle is {fingerprint}",
            "another file for the answers",
        )


async def _end(service: Service) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while not service.has_ended() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


class Batch:
    """Passes requests through `service`. Use it on the event loop, and only once."""

    def __init__(
        self,
        service: Service,
        requests: RequestFile,
        answers: AnswerFile,
        on_progress: OnProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service, self._app = service, create_app(service)
        self._requests, self._answers, self._on_progress = requests, answers, on_progress
        self._waiting = requests.requests(answers.done)
        self._clock, self._began, self._num_tokens = clock, clock(), 0

    async def run(self) -> BatchProgress:
        """Answers all requests. Raises what `run_batch` does."""
        limits = self._service.limits
        num_at_once = _SPARE_REQUESTS + (0 if limits is None else 2 * limits.max_num_seqs)
        tasks = [asyncio.create_task(self._work()) for _ in range(num_at_once)]
        stopped = asyncio.Event()
        tasks.append(asyncio.create_task(self._watch(stopped)))
        with _signals_to(stopped):
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._on_progress(self.progress)
        return self.progress

    @property
    def progress(self) -> BatchProgress:
        """The present progress."""
        return BatchProgress(
            num_done=len(self._answers.done),
            num_total=len(self._requests),
            num_errors=self._answers.num_errors,
            num_tokens=self._num_tokens,
            seconds=self._clock() - self._began,
        )

    async def _work(self) -> None:
        """Answers requests one at a time until none are left."""
        for request in self._waiting:
            answer = await answer_of(self._app, request)
            if answer.status == 503:
                raise AotGaudiError(self._service.trouble or "the engine takes no more requests")
            self._answers.append(answer)
            self._num_tokens += _num_tokens(answer.body)

    async def _watch(self, stopped: asyncio.Event) -> None:
        """Reports progress until all requests are answered. Raises an error if that can no longer happen."""
        while len(self._answers.done) < len(self._requests):
            self._on_progress(self.progress)
            if self._service.trouble:
                raise self._service.failure or AotGaudiError(self._service.trouble)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopped.wait(), _TICK_SECONDS)
                raise _StoppedError


@contextmanager
def _signals_to(stopped: asyncio.Event) -> Iterator[None]:
    """Lets SIGINT and SIGTERM set `stopped` while the context is open. Has no effect on other threads than the main one."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    for number in _SIGNALS if is_main else ():
        loop.add_signal_handler(number, stopped.set)
    try:
        yield
    finally:
        for number in _SIGNALS if is_main else ():
            loop.remove_signal_handler(number)


async def answer_of(app: ASGIApp, request: BatchRequest) -> BatchAnswer:
    """Returns the whole answer of `app`."""
    if request.body.get("stream"):
        message = "a batch has whole answers: 'stream' is not supported in it"
        return BatchAnswer(request.custom_id, 400, "", error_body(400, message, "stream"))
    sent, received = [json.dumps(request.body).encode()], bytearray()
    start: dict[str, Any] = {}

    async def receive() -> Message:
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # This client never disconnects.
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            received.extend(message.get("body", b""))

    await app(_scope(request.url), receive, send)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
    return BatchAnswer(
        request.custom_id, start["status"], headers.get(HEADER.lower(), ""), json.loads(bytes(received))
    )


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {},
    }


def _num_tokens(body: Mapping[str, Any]) -> int:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return 0
    return int(usage.get("completion_tokens") or 0)
