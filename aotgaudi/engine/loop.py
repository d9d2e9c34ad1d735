"""The engine on its thread.

============  ======================================================================================
thread        may call
============  ======================================================================================
any           `add`, `abort`, `drain`, `shutdown`, `stats`: they take the lock `_wake`
any           `failure`, `stalled_seconds`: they read single values and never wait
the engine's  everything else: the core (except `counters`), its scheduler and runner, detokenizers, callbacks
============  ======================================================================================

Requests pass to the engine's thread through `_arrivals`. Every request that `add` accepts gets exactly one last event: a
`TokenEvent` with a finish reason, or an `ErrorEvent`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

from aotgaudi.engine.constraints import Constraint, ConstraintMaker
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.output import ErrorEvent, Flush, OnEvent, OutputStream, no_flush
from aotgaudi.engine.request import NewRequest, Request
from aotgaudi.engine.stats import EngineStats
from aotgaudi.errors import RequestError

logger = logging.getLogger(__name__)

NewDetokenizer = Callable[[NewRequest], IncrementalDetokenizer]
"""Makes the detokenizer of a request, on the thread that adds it."""


class Engine:
    """Batches continuously on one thread, which blocks while there is nothing to do.

    Another thread compiles grammars. A request with a grammar arrives at the engine's thread when its grammar is compiled.

    Args:
        core: Runs the steps. After `start`, only the engine's thread uses it.
        new_detokenizer: Makes the detokenizer of a request.
        constraints: Makes the constraint of a request; None if no request has any.
        seeds: Draws seeds for requests without one.
        clock: Returns seconds from an arbitrary start.
    """

    def __init__(
        self,
        core: EngineCore,
        new_detokenizer: NewDetokenizer,
        *,
        constraints: ConstraintMaker | None = None,
        seeds: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._new_detokenizer = core, new_detokenizer
        self._clock, self._closed_because = clock, ""
        self._seeds = seeds or Random()  # noqa: S311 - sampling, not secrets
        self._thread = threading.Thread(target=self._loop, name="aotgaudi-engine", daemon=True)
        self._wake = threading.Condition()
        self._streams: dict[str, OutputStream] = {}
        self._arrivals: list[OutputStream] = []
        self._constraints = constraints
        self._compilers = ThreadPoolExecutor(1, "aotgaudi-grammars")
        self._compiling: set[OutputStream] = set()
        self._refused: list[tuple[OutputStream, Exception]] = []
        self._aborts: list[OutputStream] = []
        self._stats = self._core.status()
        self._oldest_waiting: Request | None = None
        self._progress_at = clock()
        self._is_stopping = False
        self._failure: Exception | None = None

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine's thread, or None."""
        return self._failure

    @property
    def thread_ident(self) -> int | None:
        """The identifier of the engine's thread; None before it is started."""
        return self._thread.ident

    def start(self) -> None:
        """Starts the engine's threads. Raises RuntimeError if called twice."""
        self._thread.start()
        if self._constraints is not None:
            self._compilers.submit(int)  # Creates the thread now, since the system may refuse threads later.

    def join(self) -> None:
        """Waits until the engine's thread has ended, because of `shutdown` or a `failure`."""
        self._thread.join()

    def add(self, requests: Sequence[NewRequest], on_event: OnEvent, *, flush: Flush = no_flush) -> None:
        """Queues all of `requests`, or none. Their events go to `on_event`, possibly before this returns.

        The caller has admitted them (`aotgaudi.engine.admission`); nothing is checked again. The engine's thread calls
        `on_event`. After the events of a step, it calls each distinct `flush` once.

        Raises:
            RequestError: 503; the engine drains, was shut down or has died.
        """
        streams = [
            OutputStream(self._request(new), self._new_detokenizer(new), on_event, flush) for new in requests
        ]
        slow = [stream for stream in streams if stream.request.params.structured_outputs is not None]
        for stream in streams:
            if stream not in slow:
                stream.request.constraint = self._constraint_of(stream.request)
        with self._wake:
            if self._closed_because:
                raise RequestError(self._closed_because, http_status=503)
            if not self._streams:
                self._progress_at = self._clock()
            self._streams.update((stream.request.request_id, stream) for stream in streams)
            self._arrivals += (stream for stream in streams if stream not in slow)
            self._compiling.update(slow)
            for stream in slow:
                self._compilers.submit(self._compile, stream)
            self._wake.notify_all()

    def _constraint_of(self, request: Request) -> Constraint | None:
        """Returns the constraint of a request, or None. Raises RequestError."""
        maker = self._constraints
        return None if maker is None else maker.make(request.params, request.token_ids)

    def _compile(self, stream: OutputStream) -> None:
        """Makes the constraint of a request with a grammar, and lets the request arrive. Runs on the grammar thread."""
        failure: Exception | None = None
        try:
            stream.request.constraint = self._constraint_of(stream.request)
        except BaseException as error:  # A panic of the grammar library is not an Exception.
            failure = error if isinstance(error, Exception) else RuntimeError(str(error))
        with self._wake:
            if stream not in self._compiling:
                return  # It was aborted meanwhile.
            self._compiling.remove(stream)
            if failure is None:
                self._arrivals.append(stream)
            else:
                self._refused.append((stream, failure))
            self._wake.notify_all()

    def _request(self, new: NewRequest) -> Request:
        assert new.max_tokens is not None  # Admission set it.
        params = new.params
        return Request(
            request_id=new.request_id,
            max_tokens=new.max_tokens,
            prompt_token_ids=new.prompt_token_ids,
            params=params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            arrived_at=self._clock(),
            cache_salt=new.cache_salt,
        )

    def abort(self, *request_ids: str) -> None:
        """Ends requests after the current step, and frees their blocks. Ignores unknown ids."""
        with self._wake:
            streams = [self._streams[name] for name in request_ids if name in self._streams]
            if streams:
                self._aborts += streams
                self._wake.notify_all()

    def drain(self, timeout_seconds: float = 0) -> bool:
        """Refuses new requests, waits up to `timeout_seconds` for all others, and returns whether they have ended.

        Do not call it on the engine's thread, which would wait for itself.
        """
        with self._wake:
            self._close("the server is shutting down")
            return self._wake.wait_for(lambda: not self._streams, timeout_seconds)

    def shutdown(self, timeout_seconds: float = 0) -> bool:
        """Refuses new requests, aborts all others, ends the thread, and returns whether it ended within `timeout_seconds`.

        Do not call it on the engine's thread. If the engine was never started, requests are aborted on the caller's thread.
        """
        with self._wake:
            self._close("the server is shutting down")
            self._is_stopping = True
            self._wake.notify_all()
        if self._thread.ident is None:
            self._abort_all()
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _close(self, reason: str) -> None:
        self._closed_because = self._closed_because or reason

    @property
    def stalled_seconds(self) -> float:
        """How long no step has ended although requests wait or run; 0 without requests. Never blocks."""
        return self._clock() - self._progress_at if self._streams else 0.0

    def stats(self) -> EngineStats:
        """Returns a consistent snapshot of the state after the last step. Its `counters` may include one more step."""
        with self._wake:
            oldest = self._oldest_waiting or next((stream.request for stream in self._arrivals), None)
            return replace(
                self._stats,
                counters=self._core.counters.snapshot(),
                num_waiting=self._stats.num_waiting + len(self._arrivals) + len(self._compiling),
                oldest_waiting_seconds=0.0 if oldest is None else self._clock() - oldest.arrived_at,
                stalled_seconds=self.stalled_seconds,
            )

    # The engine's thread

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._take_inbox()
                self._core.step()
                self._publish()
            self._abort_all()
        except Exception as error:  # A bug must not leave clients waiting for ever.
            logger.exception("the engine has died")
            self._die(error)

    def _wait_for_work(self) -> bool:
        """Blocks until there is work. Returns False if the engine is to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_stopping or self._has_inbox or self._core.scheduler.has_work)
            return not self._is_stopping

    @property
    def _has_inbox(self) -> bool:
        return bool(self._arrivals or self._aborts or self._refused)

    def _take_inbox(self) -> None:
        with self._wake:
            arrivals, self._arrivals = self._arrivals, []
            aborts, self._aborts = self._aborts, []
            refused, self._refused = self._refused, []
            arrivals += self._compiling.intersection(aborts)  # Must arrive before they can be aborted.
            self._compiling.difference_update(aborts)
        for stream in arrivals:
            self._core.add(stream)
        for stream, error in refused:
            self._core.refuse(stream, error)
        for stream in aborts:
            self._core.abort(stream)

    def _publish(self) -> None:
        with self._wake:
            for stream in self._core.take_ended():
                del self._streams[stream.request.request_id]
            self._stats, self._oldest_waiting = self._core.status(), self._core.scheduler.oldest_waiting
            self._progress_at = self._clock()
            self._wake.notify_all()
        self._core.flush()

    def _abort_all(self) -> None:
        with self._wake:
            self._aborts += self._compiling
            self._compilers.shutdown(wait=False)
        self._take_inbox()
        self._core.abort_all()
        self._publish()

    def _die(self, error: Exception) -> None:
        with self._wake:
            self._failure = error
            self._close("the engine has died; the server must be restarted")
            told = set(self._core.take_ended())
            untold = [stream for stream in self._streams.values() if stream not in told]
        for stream in untold:
            _tell_last(stream, error)
        with self._wake:
            self._streams.clear()
            self._wake.notify_all()


def _tell_last(stream: OutputStream, error: Exception) -> None:
    try:
        stream.on_event(ErrorEvent(request_id=stream.request.request_id, error=error))
        stream.flush()
    except Exception:  # The owner's code failed.
        name = stream.request.request_id
        logger.exception("the owner of request %r cannot be told", name, extra={"request_id": name})
