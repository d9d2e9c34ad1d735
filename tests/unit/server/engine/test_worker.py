"""What the engine's process tells the API server."""

from __future__ import annotations

from aotgaudi.engine.output import ErrorEvent, ScoredPrompt, TokenEvent
from aotgaudi.engine.steps import TokenLogprobs
from aotgaudi.entries import DecodeEntry
from aotgaudi.errors import AotGaudiError
from aotgaudi.server.engine.channel import ChannelClosedError, Told
from aotgaudi.server.engine.worker import Reporter

STEP = DecodeEntry(2, 1, 16)


class Sent:
    """In the place of a channel."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def send(self, told: Told) -> None:
        self.told.append(told)


class Closed:
    """A channel whose API server is gone."""

    def send(self, _: object) -> None:
        raise ChannelClosedError


def token(name: str, number: int = 1, logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenEvent:
    return TokenEvent(request_id=name, text="a", token_ids=(number,), logprobs=logprobs)


def test_one_message_has_all_that_a_step_gave() -> None:
    sent = Sent()
    reporter = Reporter(sent)  # type: ignore[arg-type]
    reporter.on_step(STEP, 0.25, 2)
    events = (token("a"), token("b"))
    for event in events:
        reporter.on_event(event)
    assert sent.told == []

    reporter.flush()

    assert sent.told == [Told(events, (("decode", 0.25),))]


def test_steps_that_give_nobody_anything_are_told_of_in_time() -> None:
    sent = Sent()
    reporter = Reporter(sent)  # type: ignore[arg-type]
    reporter._told_at = float("-inf")
    reporter.on_step(STEP, 1.0, 1)
    reporter.on_step(STEP, 2.0, 1)

    assert sent.told == [Told((), (("decode", 1.0),))]
    reporter.flush()
    assert sent.told[1:] == [Told((), (("decode", 2.0),))]


def test_the_text_of_a_token_is_told_once_and_only_where_it_is_shown() -> None:
    sent = Sent()
    reporter = Reporter(sent, lambda number: f"<{number}>")  # type: ignore[arg-type]
    shown = token("a", 7, (TokenLogprobs(-1.0, ((8, -0.5), (7, -1.0))),))
    for event in (token("a", 9), shown, shown):
        reporter.on_event(event)
        reporter.flush()

    assert [dict(told.texts) for told in sent.told] == [{}, {7: "<7>", 8: "<8>"}, {}]


def test_errors_that_cannot_be_sent_are_told_of_in_words() -> None:
    class LocalError(Exception):
        pass

    sent = Sent()
    reporter = Reporter(sent)  # type: ignore[arg-type]
    reporter.on_event(ErrorEvent(request_id="a", error=LocalError("it broke")))
    reporter.flush()

    (event,) = sent.told[0].events
    assert isinstance(event, ErrorEvent)
    assert (type(event.error), str(event.error)) == (AotGaudiError, "it broke")


def test_a_front_that_is_gone_does_not_stop_a_step() -> None:
    reporter = Reporter(Closed())  # type: ignore[arg-type]
    reporter.on_event(token("a"))

    reporter.flush()


def test_texts_of_a_scored_prompt_are_told_with_it() -> None:
    sent = Sent()
    reporter = Reporter(sent, str)  # type: ignore[arg-type]
    prompt = ScoredPrompt((5, 6), (TokenLogprobs(-1.0, ((7, -0.5),)),))

    reporter.on_event(TokenEvent(request_id="a", text="a", token_ids=(1,), prompt=prompt))
    reporter.flush()

    assert sent.told[0].texts == {5: "5", 6: "6", 7: "7"}
