"""The work of the engine process: it starts the model, obeys the API server, and reports the results of steps to it."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from aotgaudi.engine.loop import Engine
from aotgaudi.engine.output import ErrorEvent, Event, TokenEvent
from aotgaudi.entries import Entry
from aotgaudi.errors import AotGaudiError, RequestError, machine_error
from aotgaudi.llm.running import Observers, RunningModel
from aotgaudi.llm.start import start
from aotgaudi.phases import Phases
from aotgaudi.runtime.memory import freed_memory
from aotgaudi.server.engine.channel import (
    Abort,
    Add,
    Ask,
    Begin,
    Channel,
    ChannelClosedError,
    Failed,
    Opened,
    Running,
    Status,
    Stop,
    Told,
    sendable,
)
from aotgaudi.server.log import log_handler

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 5e-4
"""Python's switch interval: how long the listening thread may delay the engine's. The default, 5 ms, is half a step."""
_HOUSEKEEPING_SECONDS = 5.0
_SILENCE_SECONDS = 0.25
"""Steps without events are reported this often, so that the API server sees that the engine advances."""


def run_engine(channel: Channel, phases: Phases) -> bool:
    """Starts a model and runs it, as the API server says, until it says to stop. Returns False if the engine died.

    Raises ChannelClosedError if the API server goes away before the model runs. If it goes away later, the process ends at
    once.
    """
    begin: Begin = channel.receive()
    logging.basicConfig(level=logging.INFO, handlers=[log_handler(sys.stderr, begin.log_format)])
    logging.captureWarnings(begin.log_format == "json")
    sys.setswitchinterval(_SWITCH_SECONDS)
    reporter = Reporter(channel)
    try:
        model = start(
            begin.options,
            Observers(
                on_model=lambda directory: channel.send(Opened(directory)),
                on_step=reporter.on_step,
                phases=phases,
            ),
        )
        if begin.options.require_warm:
            with phases.time("guard"):
                model.guard.arm(seccomp=begin.seccomp)
    except Exception as raised:
        error = machine_error(raised) or raised
        if not isinstance(error, (AotGaudiError, ImportError)):
            # A bug of ours, of which the API server shows only the message.
            logger.exception("the start has failed")
        channel.send(Failed(sendable(error)))
        return False
    reporter.text_of = model.tokenizer.token_text
    gc.freeze()  # Loaded objects stay, so the collector can skip them.
    gc.enable()
    channel.send(_running(model, phases))

    def listen() -> None:
        obey(channel, model, reporter)
        os._exit(0)  # The API server is gone, and the engine may be in the middle of a step.

    threading.Thread(target=listen, name="aotgaudi-listener", daemon=True).start()
    model.engine.join()
    logging.shutdown()
    return model.engine.failure is None


def _running(model: RunningModel, phases: Phases) -> Running:
    return Running(
        rules=model.rules,
        defaults=model.defaults,
        manifest_id=model.manifest_id,
        binding=model.binding,
        status=_status(model),
        phases=phases.done,
    )


def _status(model: RunningModel) -> Status:
    return Status(model.engine.stats(), model.warmth())


class Reporter:
    """Reports the results of steps to the API server. Use it on the engine's thread.

    `text_of` returns the text of a token. The text is sent with the first log-probability of that token.
    """

    def __init__(self, channel: Channel, text_of: Callable[[int], str] = str) -> None:
        self.text_of = text_of
        self._channel = channel
        self._events: list[Event] = []
        self._steps: list[tuple[str, float]] = []
        self._told_at = time.monotonic()
        self._known: set[int] = set()

    def on_step(self, entry: Entry, seconds: float, num_rows: int) -> None:
        """Records a step (an `OnStep`), and sends a report if the last one is too old."""
        del num_rows
        self._steps.append((entry.kind, seconds))
        if time.monotonic() - self._told_at > _SILENCE_SECONDS:
            self.flush()

    def on_event(self, event: Event) -> None:
        """Keeps an event until `flush` sends it."""
        self._events.append(event)

    def flush(self) -> None:
        """Sends all that was recorded. Blocks while the API server is behind: it could not use further steps anyway."""
        events, self._events = self._events, []
        steps, self._steps = self._steps, []
        self._told_at = time.monotonic()
        told = Told(tuple(map(_sendable, events)), tuple(steps), self._new_texts(events))
        with suppress(ChannelClosedError):  # The API server is gone, and this process is about to end.
            self._channel.send(told)

    def _new_texts(self, events: list[Event]) -> dict[int, str]:
        new = {token_id for event in events for token_id in _shown_ids(event)} - self._known
        self._known |= new
        return {token_id: self.text_of(token_id) for token_id in new}


def _shown_ids(event: Event) -> Iterator[int]:
    """Yields the tokens whose texts an answer with log-probabilities shows."""
    if not isinstance(event, TokenEvent):
        return
    if event.logprobs:
        yield from event.token_ids
    if event.prompt is not None:
        yield from event.prompt.token_ids
    for place in (*event.logprobs, *(event.prompt.logprobs if event.prompt else ())):
        yield from (token_id for token_id, _ in place.top)


def _sendable(event: Event) -> Event:
    if isinstance(event, TokenEvent):
        return event
    return ErrorEvent(request_id=event.request_id, error=sendable(event.error))


def obey(channel: Channel, model: RunningModel, reporter: Reporter) -> None:
    """Executes the API server's messages until it is gone, and gives back memory in between. Runs on its own thread."""
    memory = freed_memory()
    with suppress(ChannelClosedError):
        while True:
            if channel.wait(_HOUSEKEEPING_SECONDS):
                _do(channel.receive(), channel, model, reporter)
            else:
                memory.give_back()


def _do(message: object, channel: Channel, model: RunningModel, reporter: Reporter) -> None:
    engine = model.engine
    if isinstance(message, Add):
        _add(engine, message, channel, reporter)
    elif isinstance(message, Abort):
        engine.abort(*message.request_ids)
    elif isinstance(message, Ask):
        channel.send(_status(model))
    elif isinstance(message, Stop):
        engine.shutdown()


def _add(engine: Engine, message: Add, channel: Channel, reporter: Reporter) -> None:
    try:
        engine.add(message.requests, reporter.on_event, flush=reporter.flush)
    except RequestError as error:  # The engine has died, and the API server will soon learn that.
        channel.send(
            Told(tuple(ErrorEvent(request_id=each.request_id, error=error) for each in message.requests))
        )
