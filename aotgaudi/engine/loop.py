"""The engine on its thread.

============  ==================================================================================
thread        may
============  ==================================================================================
any           `add`, `abort`, `drain`, `shutdown`, `stats`, `failure`: they touch what `_wake` guards
the engine's  everything else: the core, its scheduler and runner, detokenizers, callbacks
============  ==================================================================================

Requests cross over in `_arrivals`. Every request that `add` has accepted gets exactly one last event: a `TokenEvent`
with a finish reason, or an `ErrorEvent`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from aotgaudi.engine.admission import Admission
from aotgaudi.engine.core import EngineCore, EngineStats
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.output import ErrorEvent, OnEvent, OutputStream
from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import RequestError

logger = logging.getLogger(__name__)

NewDetokenizer = Callable[[Sequence[int]], IncrementalDetokenizer]
"""Makes the detokenizer of a request from its prompt's token ids, on the thread that adds the request."""


class Engine:
    """Continuous batching on one thread, which blocks while there is nothing to do.

    Args:
        core: Runs the steps; from `start` on, only the engine's thread uses it.
        admission: Which requests are admitted.
        new_detokenizer: Makes the detokenizer of a request.
        seeds: Gives requests without a seed theirs.
    """

    def __init__(
        self,
        core: EngineCore,
        admission: Admission,
        new_detokenizer: NewDetokenizer,
        *,
        seeds: Random | None = None,
    ) -> None:
        self._core, self._admission, self._new_detokenizer = core, admission, new_detokenizer
        self._seeds = seeds or Random()  # noqa: S311 - sampling, not secrets
        self._thread = threading.Thread(target=self._loop, name="aotgaudi-engine", daemon=True)
        self._wake = threading.Condition()
        self._streams: dict[str, OutputStream] = {}
        self._arrivals: list[OutputStream] = []
        self._aborts: list[OutputStream] = []
        self._stats = self._core.stats()
        self._refusal: str | None = None
        self._is_stopping = False
        self._failure: Exception | None = None

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine's thread; None while it is well."""
        return self._failure

    @property
    def thread_ident(self) -> int | None:
        """The identifier of the engine's thread; None before it is started."""
        return self._thread.ident

    def start(self) -> None:
        """Starts the engine's thread. Raises RuntimeError when called twice."""
        self._thread.start()

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        on_event: OnEvent,
    ) -> None:
        """Queues a request. Its events go to `on_event`, on the engine's thread, possibly before this returns.

        Raises:
            RequestError: 400 when the request can never run, or its id is in use; 503 when the engine drains,
                was shut down, or has died.
        """
        max_tokens = self._admission.check(prompt_token_ids, params)
        detokenizer = self._new_detokenizer(prompt_token_ids)
        with self._wake:
            self._check_open(request_id)
            request = Request(
                request_id=request_id,
                prompt_token_ids=tuple(prompt_token_ids),
                params=params,
                max_tokens=max_tokens,
                seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            )
            stream = OutputStream(request, detokenizer, on_event)
            self._streams[request_id] = stream
            self._arrivals.append(stream)
            self._wake.notify_all()

    def abort(self, request_id: str) -> None:
        """Ends a request after the step that runs now, and frees its blocks. Ignores ids that are not in use."""
        with self._wake:
            stream = self._streams.get(request_id)
            if stream is not None:
                self._aborts.append(stream)
                self._wake.notify_all()

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Refuses new requests and waits for the others to end. Returns whether they have.

        Must not be called on the engine's thread, which would wait for itself.
        """
        with self._wake:
            self._refuse("the server is shutting down")
            return self._wake.wait_for(lambda: not self._streams, timeout_seconds)

    def shutdown(self, timeout_seconds: float | None = None) -> bool:
        """Refuses new requests, aborts the others and ends the thread. Returns whether it has ended.

        Must not be called on the engine's thread. An engine that was never started aborts on the caller's.
        """
        with self._wake:
            self._refuse("the server is shutting down")
            self._is_stopping = True
            self._wake.notify_all()
        if self._thread.ident is None:
            self._abort_all()
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Returns a consistent snapshot of the moment after the last step."""
        with self._wake:
            return replace(self._stats, num_waiting=self._stats.num_waiting + len(self._arrivals))

    # Under the lock

    def _refuse(self, reason: str) -> None:
        self._refusal = self._refusal or reason

    def _check_open(self, request_id: str) -> None:
        if self._refusal is not None:
            raise RequestError(self._refusal, http_status=503)
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    # The engine's thread

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._take_inbox()
                self._core.step()
                self._publish()
            self._abort_all()
        except Exception as error:  # The edge of the thread: a bug must not leave clients waiting for ever.
            logger.exception("the engine has died")
            self._die(error)

    def _wait_for_work(self) -> bool:
        """Blocks until there is work. Returns False when the engine is to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_stopping or self._has_inbox or self._core.has_work)
            return not self._is_stopping

    @property
    def _has_inbox(self) -> bool:
        return bool(self._arrivals or self._aborts)

    def _take_inbox(self) -> None:
        with self._wake:
            arrivals, self._arrivals = self._arrivals, []
            aborts, self._aborts = self._aborts, []
        for stream in arrivals:
            self._core.add(stream)
        for stream in aborts:
            self._core.abort(stream)

    def _publish(self) -> None:
        with self._wake:
            for stream in self._core.take_ended():
                del self._streams[stream.request.request_id]
            self._stats = self._core.stats()
            self._wake.notify_all()

    def _abort_all(self) -> None:
        self._take_inbox()
        self._core.abort_all()
        self._publish()

    def _die(self, error: Exception) -> None:
        with self._wake:
            self._failure = error
            self._refuse("the engine has died; the server must be restarted")
            told = self._core.take_ended()
            untold = [stream for stream in self._streams.values() if stream not in told]
        for stream in untold:
            _tell_last(stream, error)
        with self._wake:
            self._streams.clear()
            self._wake.notify_all()


def _tell_last(stream: OutputStream, error: Exception) -> None:
    try:
        stream.on_event(ErrorEvent(request_id=stream.request.request_id, error=error))
    except Exception:  # The owner's code.
        logger.exception("the owner of request %r cannot be told", stream.request.request_id)
