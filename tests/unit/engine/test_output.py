from __future__ import annotations

import pytest

from aotgaudi.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer
from aotgaudi.engine.output import OutputStream, TokenEvent, Usage
from aotgaudi.engine.request import FinishReason
from aotgaudi.engine.sampling_params import SamplingParams
from tests.driving import request_of


def _play(output: bytes, reason: FinishReason, *stops: str, keeps_stop: bool = False) -> list[TokenEvent]:
    """Returns the events of a request whose tokens are these bytes and whose last token ends it."""
    request = request_of(tuple(b"p"), 100, SamplingParams(stop=stops, include_stop_str_in_output=keeps_stop))
    detokenizer = IncrementalDetokenizer(lambda ids: bytes(ids).decode(errors="replace"))
    stream = OutputStream(request, detokenizer, lambda event: None)
    request.admit([1])
    events: list[TokenEvent] = []
    for index, byte in enumerate(output):
        request.append_token(byte)
        if index == len(output) - 1:
            request.finish(reason)
        events.append(stream.token_event())
    return events


@pytest.mark.parametrize(
    ("output", "reason", "stops", "text"),
    [
        ("a€".encode(), "length", (), "a€"),
        ("a€".encode()[:-1], "length", (), f"a{REPLACEMENT}"),
        ("a€".encode()[:-1] + b"$", "stop", (), f"a{REPLACEMENT}"),
        (b"ab$", "stop", ("bc",), "ab"),
        (b"ab", "length", ("bc",), "ab"),
        (b"abc", "length", ("bc",), "a"),
        ("ab€".encode(), "length", ("b€",), "a"),
    ],
)
def test_the_text_of_an_output(
    output: bytes, reason: FinishReason, stops: tuple[str, ...], text: str
) -> None:
    events = _play(output, reason, *stops)

    assert "".join(event.text for event in events) == text
    assert bytes(token for event in events for token in event.token_ids) == output
    assert [event.usage for event in events] == [None] * (len(output) - 1) + [Usage(1, len(output))]


@pytest.mark.parametrize(
    ("output", "reason", "stops", "text"),
    [
        (b"ab$", "stop", (), "ab$"),
        (b"abc", "length", ("bc",), "abc"),
        (b"ab", "length", ("bc",), "ab"),
        ("ab€".encode(), "length", ("b€", "€"), "ab€"),
    ],
)
def test_what_ends_an_output_is_included_on_request(
    output: bytes, reason: FinishReason, stops: tuple[str, ...], text: str
) -> None:
    events = _play(output, reason, *stops, keeps_stop=True)

    assert "".join(event.text for event in events) == text


def test_a_stop_string_outranks_the_length() -> None:
    assert _play(b"abc", "length", "bc")[-1].finish_reason == "stop"


def test_the_stop_string_that_ended_an_output_is_its_reason() -> None:
    assert [event.stop_reason for event in _play(b"abcd", "length", "x", "cd", "d")] == [*[None] * 3, "cd"]
    assert _play(b"ab", "stop", "x")[-1].stop_reason is None
