"""The engine without threads. Each call of `EngineCore.step` schedules, runs, completes and reports one step.

::

    scheduled = scheduler.schedule()            choose requests and an entry
    result = runner.run(scheduled.step)         compute on the device
    runner.clear(scheduler.discard(...))        drop requests with NaN
    sampled = scheduler.complete(...)           append tokens, end requests, free blocks
    stream.on_event(stream.token_event())       send text to the owner of each request that got a token, then `flush`
    runner.exchange(plan_step(...))             defragment, if due
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from aotgaudi.engine.defragmenter import plan_step
from aotgaudi.engine.output import ErrorEvent, Event, Flush, OutputStream
from aotgaudi.engine.request import Request
from aotgaudi.engine.scheduler import Scheduled, Scheduler, UncoveredStepError
from aotgaudi.engine.stats import Counters, EngineStats
from aotgaudi.engine.steps import (
    DefragStep,
    PromptRow,
    PromptStep,
    Step,
    StepResult,
    StepRunner,
    TokenLogprobs,
)
from aotgaudi.entries import Entry
from aotgaudi.errors import RequestError
from aotgaudi.spec.scheduler import DefragSpec

logger = logging.getLogger(__name__)

OnStep = Callable[[Entry, float, int], None]
"""Called after each step with its entry, its seconds, and its number of rows (for a defragmentation, of moves)."""


class EngineCore:
    """Runs the scheduler's steps and turns their results into events. Not thread-safe.

    If a step fails, each of its requests fails with an `ErrorEvent`, and other requests go on. A single request fails if no
    entry covers its next step, or if the model computes NaN for it.

    Args:
        scheduler: Forms the steps.
        runner: Runs the steps.
        defrag: When to defragment; None for never.
        on_step: Is called with the time of each step.
        clock: Returns seconds, on the same clock as `arrived_at`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        defrag: DefragSpec | None = None,
        on_step: OnStep | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._runner, self._defrag = runner, defrag
        self._on_step, self._clock = on_step, clock
        self.counters = Counters()
        self._streams: dict[Request, OutputStream] = {}
        self._ended: list[OutputStream] = []
        self._unflushed: set[Flush] = set()
        self._num_finished: Counter[str] = Counter()
        self._num_failed_steps = 0
        self._num_prefill_tokens = 0
        self._num_output_tokens = 0
        self._num_defrag_swaps = 0
        self._num_invalid_logits = 0

    def add(self, stream: OutputStream) -> None:
        """Queues the stream's request, which has passed admission."""
        self._streams[stream.request] = stream
        self.scheduler.add(stream.request)

    def refuse(self, stream: OutputStream, error: Exception) -> None:
        """Ends the stream's request, which was not added, with `error`."""
        self.add(stream)
        self._fail((stream.request,), error)

    def abort(self, stream: OutputStream) -> None:
        """Ends the stream's request now and frees its blocks. Does nothing if it has ended already."""
        if stream.request not in self._streams:
            return
        self.scheduler.finish(stream.request, "abort")
        self._emit(stream, stream.abort_event())

    def abort_all(self) -> None:
        """Ends every request."""
        for stream in list(self._streams.values()):
            self.abort(stream)

    def step(self) -> bool:
        """Runs one step, and a defragmentation if one is due. Returns False if there is nothing to do."""
        scheduled = self._schedule()
        if scheduled is None:
            return False
        self._run(scheduled)
        self._defragment()
        return True

    def take_ended(self) -> list[OutputStream]:
        """Returns the streams that got their last event since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def flush(self) -> None:
        """Calls each distinct `flush` of the streams that got an event since the last call."""
        unflushed, self._unflushed = self._unflushed, set()
        for flush in unflushed:
            flush()

    def stats(self) -> EngineStats:
        """Returns a snapshot."""
        return replace(self.status(), counters=self.counters.snapshot())

    def status(self) -> EngineStats:
        """Returns a snapshot without `counters`, which any thread may read. Cheap, since it is called after every step."""
        scheduler, prefixes = self.scheduler, self.scheduler.prefixes
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks_used=scheduler.pool.num_used,
            num_blocks_free=scheduler.pool.num_free,
            num_failed_steps=self._num_failed_steps,
            num_prefill_tokens=self._num_prefill_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_defrag_swaps=self._num_defrag_swaps,
            num_finished=dict(self._num_finished),
            num_invalid_logits=self._num_invalid_logits,
            num_blocks_kept=len(scheduler.pool.kept),
            num_blocks_evicted=scheduler.pool.num_evicted,
            num_prefix_queries=0 if prefixes is None else prefixes.num_queries,
            num_prefix_hits=0 if prefixes is None else prefixes.num_hits,
            max_block_used=scheduler.pool.max_used,
        )

    # Steps

    def _schedule(self) -> Scheduled | None:
        while True:
            try:
                return self.scheduler.schedule()
            except UncoveredStepError as error:
                logger.warning("%s", error, extra={"request_id": error.request.request_id})
                self._fail((error.request,), error)

    def _run(self, scheduled: Scheduled) -> None:
        step = scheduled.step
        try:
            began = self._clock()
            result = self._runner.run(step)
            ended = self._clock()
            seconds = ended - began
            scores = isinstance(step, PromptStep) and step.scores
            self.scheduler.observe(step.entry, seconds, is_usual=not scores)
            rows = (scheduled.requests[row] for row in sorted(result.invalid_rows))
            invalid = [request for request in rows if not request.is_finished]
            for request in invalid:
                self._runner.clear(self.scheduler.discard(request))
            for row, values in result.prompt_logprobs.items():
                scheduled.requests[row].prompt_logprobs += values
            self._refuse_rows(scheduled, result)
            sampled = self.scheduler.complete(scheduled, result.token_ids)
        except Exception as error:  # A failed step must not end the engine.
            self._fail_step(step, scheduled.requests, error)
            return
        self._count(scheduled, sampled, (began, ended))
        self._observe(step.entry, seconds, len(step.rows))
        logprobs = {scheduled.requests[row]: values for row, values in result.logprobs.items()}
        for request in sampled:
            self._tell(self._streams[request], logprobs.get(request))
        self._refuse_to_sample(invalid)

    def _refuse_rows(self, scheduled: Scheduled, result: StepResult) -> None:
        """Fails requests whose constraint has failed, each with its reason."""
        for row, error in sorted(result.refused_rows.items()):
            request = scheduled.requests[row]
            if not request.is_finished:
                self._fail((request,), error)

    def _refuse_to_sample(self, requests: Sequence[Request]) -> None:
        """Fails requests for which the model computed NaN. Logs only the first, since a damaged model fails all requests."""
        error = RequestError(
            "The model computed NaN or infinite logits for this request: no token can be chosen. Its weights are damaged, "
            "or too large for their data type",
            http_status=500,
        )
        if requests and not self._num_invalid_logits:
            name = requests[0].request_id
            logger.error("request %r: %s", name, error, extra={"request_id": name})
        self._num_invalid_logits += len(requests)
        self._fail(requests, error)

    def _defragment(self) -> None:
        step = None if self._defrag is None else plan_step(self.scheduler.pool, self._defrag)
        if step is None:
            return
        try:
            start = self._clock()
            self._runner.exchange(step)
            seconds = self._clock() - start
        except Exception as error:  # The contents of the moved blocks are unknown now.
            self.scheduler.pool.forget([block for move in step.moves for block in move])
            self._fail_step(step, self.scheduler.owners([source for source, _ in step.moves]), error)
            return
        self.scheduler.observe(step.entry, seconds)
        self.scheduler.relocate(step.moves)
        self.counters.count_defrag(step, seconds)
        self._num_defrag_swaps += len(step.moves)
        self._observe(step.entry, seconds, len(step.moves))

    def _fail_step(self, step: Step | DefragStep, requests: Sequence[Request], error: Exception) -> None:
        names = ",".join(request.request_id for request in requests)
        logger.error("the step %s has failed", step.entry, exc_info=error, extra={"request_id": names})
        self._num_failed_steps += 1
        self._fail(requests, error)

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        for request in requests:
            if not request.is_finished:
                self.scheduler.finish(request, "abort")
            if request in self._streams:  # Otherwise it was aborted while its step ran.
                self._emit(self._streams[request], ErrorEvent(request_id=request.request_id, error=error))

    # Events

    def _tell(self, stream: OutputStream, logprobs: TokenLogprobs | None) -> None:
        event = stream.token_event(logprobs)
        if event.finish_reason is not None and not stream.request.is_finished:
            self.scheduler.finish(stream.request, event.finish_reason)
        self._emit(stream, event)

    def _emit(self, stream: OutputStream, event: Event) -> None:
        is_last = isinstance(event, ErrorEvent) or event.finish_reason is not None
        self._unflushed.add(stream.flush)
        try:
            stream.on_event(event)
        except Exception:  # The owner's code failed, so we treat it like a client that left.
            name = event.request_id
            logger.exception("the owner of request %r cannot be told", name, extra={"request_id": name})
            if not stream.request.is_finished:
                self.scheduler.finish(stream.request, "abort")
            is_last = True
        if is_last:
            self._end(stream, "error" if isinstance(event, ErrorEvent) else event.finish_reason or "abort")

    def _end(self, stream: OutputStream, reason: str) -> None:
        del self._streams[stream.request]
        self._ended.append(stream)
        self._num_finished[reason] += 1

    def _observe(self, entry: Entry, seconds: float, num_rows: int) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(entry, seconds, num_rows)
        except Exception:  # The observer's code must not affect the engine.
            logger.exception("an observer of steps has failed")

    def _count(self, scheduled: Scheduled, sampled: Sequence[Request], span: tuple[float, float]) -> None:
        step, block_size = scheduled.step, self.scheduler.limits.block_size
        self.counters.count(step, block_size, scheduled.requests, sampled, span)
        self._num_prefill_tokens += sum(len(row.token_ids) for row in step.rows if isinstance(row, PromptRow))
        self._num_output_tokens += len(sampled)
