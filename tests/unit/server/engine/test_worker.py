"""What the engine's process tells the API server."""

from __future__ import annotations

from collections.abc import Callable

from aotgaudi.engine.output import ErrorEvent, Event, ScoredPrompt, TokenEvent
from aotgaudi.engine.steps import TokenLogprobs
from aotgaudi.entries import DecodeEntry
from aotgaudi.errors import AotGaudiError
from aotgaudi.server.engine.channel import ChannelClosedError, Told
from aotgaudi.server.engine.worker import Reporter

STEP = DecodeEntry(2, 1, 16)


class Sent:
    """In the place of a channel, and the reporter that sends over it."""

    def __init__(self, text_of: Callable[[int], str] = str) -> None:
        self.told: list[Told] = []
        self.is_closed = False
        self.reporter = Reporter(self, text_of)  # type: ignore[arg-type]

    def send(self, told: Told) -> None:
        if self.is_closed:
            raise ChannelClosedError
        self.told.append(told)

    def report(self, *events: Event) -> None:
        for event in events:
            self.reporter.on_event(event)
        self.reporter.flush()


def token(name: str, number: int = 1, logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenEvent:
    return TokenEvent(request_id=name, text="a", token_ids=(number,), logprobs=logprobs)


def test_one_message_has_all_that_a_step_gave() -> None:
    sent = Sent()
    events = (token("a"), token("b"))
    sent.reporter.on_step(STEP, 0.25, 2)
    assert sent.told == []

    sent.report(*events)

    assert sent.told == [Told(events, (("decode", 0.25),))]


def test_steps_that_give_nobody_anything_are_told_of_in_time() -> None:
    sent = Sent()
    reporter = sent.reporter
    reporter._told_at = float("-inf")
    reporter.on_step(STEP, 1.0, 1)
    reporter.on_step(STEP, 2.0, 1)

    assert sent.told == [Told((), (("decode", 1.0),))]
    reporter.flush()
    assert sent.told[1:] == [Told((), (("decode", 2.0),))]


def test_the_text_of_a_token_is_told_once_and_only_where_it_is_shown() -> None:
    sent = Sent(lambda number: f"<{number}>")
    shown = token("a", 7, (TokenLogprobs(-1.0, ((8, -0.5), (7, -1.0))),))
    for event in (token("a", 9), shown, shown):
        sent.report(event)

    assert [dict(told.texts) for told in sent.told] == [{}, {7: "<7>", 8: "<8>"}, {}]


def test_errors_that_cannot_be_sent_are_told_of_in_words() -> None:
    class LocalError(Exception):
        pass

    sent = Sent()
    sent.report(ErrorEvent(request_id="a", error=LocalError("it broke")))

    (event,) = sent.told[0].events
    assert isinstance(event, ErrorEvent)
    assert (type(event.error), str(event.error)) == (AotGaudiError, "it broke")


def test_a_front_that_is_gone_does_not_stop_a_step() -> None:
    sent = Sent()
    sent.is_closed = True

    sent.report(token("a"))


def test_texts_of_a_scored_prompt_are_told_with_it() -> None:
    sent = Sent()
    prompt = ScoredPrompt((5, 6), (TokenLogprobs(-1.0, ((7, -0.5),)),))

    sent.report(TokenEvent(request_id="a", text="a", token_ids=(1,), prompt=prompt))

    assert sent.told[0].texts == {5: "5", 6: "6", 7: "7"}
