"""The output of one request: from sampled tokens to events."""

from __future__ import annotations

from aotgaudi.engine.detokenizer import IncrementalDetokenizer, StopChecker
from aotgaudi.engine.events import OnEvent, TokenEvent, Usage
from aotgaudi.engine.request import FinishReason, Request
from aotgaudi.engine.steps import TokenLogprobs


class OutputStream:
    """Turns the tokens of `request` into events. The engine's thread owns it."""

    def __init__(self, request: Request, detokenizer: IncrementalDetokenizer, on_event: OnEvent) -> None:
        self.request, self.on_event = request, on_event
        self._detokenizer = detokenizer
        self._stops = StopChecker(request.params.stop)

    def token_event(self, logprobs: TokenLogprobs | None = None) -> TokenEvent:
        """Returns the event of the newest token, to be called once a token.

        The event ends the request with "stop" when the token completes a stop string, even where the request
        has not ended yet or has ended for another reason. The token that ends a request has no text.
        """
        request = self.request
        text = "" if request.finish_reason == "stop" else self._detokenizer.push(request.last_token_id)
        if request.is_finished:
            text += self._detokenizer.flush()
        piece = self._stops.push(text)
        if request.is_finished and not self._stops.is_stopped:
            piece += self._stops.flush()
        reason: FinishReason | None = "stop" if self._stops.is_stopped else request.finish_reason
        return self._event(piece, (request.last_token_id,), reason, logprobs)

    def abort_event(self) -> TokenEvent:
        """Returns the last event of a request that is aborted; text that is held back is dropped."""
        return self._event("", (), "abort")

    def _event(
        self,
        text: str,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        logprobs: TokenLogprobs | None = None,
    ) -> TokenEvent:
        request = self.request
        usage = None if reason is None else Usage(request.num_prompt_tokens, request.num_output_tokens)
        return TokenEvent(
            request_id=request.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            usage=usage,
        )
