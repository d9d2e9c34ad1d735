"""The events that the engine sends to the owner of a request, and the stream that makes them from sampled tokens.

A sampled token takes three forms: the sampler's id, a `TokenEvent` with its text (here), and JSON (server/responses.py) or
an `Output` (the Python API).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Union

from aotgaudi.engine.detokenizer import IncrementalDetokenizer, StopChecker
from aotgaudi.engine.request import FinishReason, Request
from aotgaudi.engine.steps import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, at its end.

    `num_cached_tokens` of its prompt were in the prefix cache. `queue_seconds` is how long it waited for its first step.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    queue_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt, and the log-probabilities of its tokens. The first token has none, because nothing precedes it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New output of one request. All its events joined are the whole output.

    `text` may be empty while `token_ids` is not, since text is held back until it is certain. `logprobs` has one item per
    token if the request asked for log-probabilities, and is empty otherwise. `finish_reason` and `usage` are set on the last
    event only. `prompt` is set on the first event, if the request asked for its prompt's log-probabilities. `stop_reason`
    is the stop string, or the id of the stop token, that ended the output; None if something else did, such as an end of
    sequence.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    prompt: ScoredPrompt | None = None

    @classmethod
    def joined(cls, events: Sequence[TokenEvent]) -> TokenEvent:
        """Returns a single event that joins all events of one request, given in order (at least one)."""
        last = events[-1]
        return cls(
            request_id=last.request_id,
            text="".join(event.text for event in events),
            token_ids=tuple(chain.from_iterable(event.token_ids for event in events)),
            logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            usage=last.usage,
            prompt=events[0].prompt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent:
    """The last event of a request whose step failed."""

    request_id: str
    error: Exception


Event = Union[TokenEvent, ErrorEvent]
OnEvent = Callable[[Event], None]
"""Called on the engine's thread. It must return soon, and must itself pass the event to other threads."""
Flush = Callable[[], None]
"""Called on the engine's thread after the events of a step, once for all streams that share it. It must not raise."""


def no_flush() -> None:
    """Does nothing, for owners that handle each event at once."""


class OutputStream:
    """Turns the tokens of `request` into events. The engine's thread owns it.

    `flush` is called after the events of a step, so that an owner can notify another thread of many events at once.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: IncrementalDetokenizer,
        on_event: OnEvent,
        flush: Flush = no_flush,
    ) -> None:
        self.request, self.on_event, self.flush = request, on_event, flush
        self._detokenizer = detokenizer
        self._keeps_stop = request.params.include_stop_str_in_output
        self._stops = StopChecker(request.params.stop, keeps_stop=self._keeps_stop)

    def token_event(self, logprobs: TokenLogprobs | None = None) -> TokenEvent:
        """Returns the event of the newest token. Call it once per token.

        If the token completes a stop string, the event ends the request with "stop", even if the request has not ended or
        has ended for another reason. Stop strings within the first `min_tokens` tokens do not count. A token that itself
        ends the request (end of sequence, or one of `stop_token_ids`) has no text, unless the request asks to include it.
        """
        request = self.request
        is_silent = request.finish_reason == "stop" and not self._keeps_stop
        text = "" if is_silent else self._detokenizer.push(request.last_token_id)
        if request.is_finished:
            text += self._detokenizer.flush()
        is_short = request.num_output_tokens <= request.params.min_tokens
        piece = text if is_short else self._stops.push(text)
        if request.is_finished and not self._stops.is_stopped:
            piece += self._stops.flush()
        reason: FinishReason | None = "stop" if self._stops.is_stopped else request.finish_reason
        return TokenEvent(
            request_id=request.request_id,
            text=piece,
            token_ids=(request.last_token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=reason,
            stop_reason=self._stops.found or request.stop_token_id,
            usage=None if reason is None else self._usage(),
            prompt=self._scored_prompt() if request.num_output_tokens == 1 else None,
        )

    def abort_event(self) -> TokenEvent:
        """Returns the last event of an aborted request. Text that was held back is dropped."""
        return TokenEvent(
            request_id=self.request.request_id,
            text="",
            token_ids=(),
            finish_reason="abort",
            usage=self._usage(),
        )

    def _scored_prompt(self) -> ScoredPrompt | None:
        request = self.request
        if request.params.prompt_logprobs is None:
            return None
        token_ids = tuple(request.token_ids[: request.num_prompt_tokens])
        return ScoredPrompt(token_ids, tuple(request.prompt_logprobs))

    def _usage(self) -> Usage:
        request = self.request
        return Usage(
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.num_cached_tokens,
            request.queue_seconds,
        )
