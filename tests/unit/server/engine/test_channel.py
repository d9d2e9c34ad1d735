"""What goes into a channel comes out of it, however it is cut."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.output import TokenEvent
from aotgaudi.errors import AotGaudiError, RequestError, SpecError
from aotgaudi.server.engine.channel import (
    Abort,
    Ask,
    Channel,
    ChannelClosedError,
    Frames,
    Told,
    frame,
    sendable,
)

MESSAGES = st.one_of(
    st.just(Ask()),
    st.builds(Abort, st.lists(st.text(), max_size=4).map(tuple)),
    st.builds(
        Told,
        st.lists(
            st.builds(
                TokenEvent,
                request_id=st.text(),
                text=st.text(),
                token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
            ),
            max_size=3,
        ).map(tuple),
    ),
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(0, 2000), max_size=12))
def test_messages_come_out_as_they_went_in_however_they_are_cut(
    messages: list[object], cuts: list[int]
) -> None:
    data, frames, found = b"".join(map(frame, messages)), Frames(), []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})

    for begin, end in itertools.pairwise(edges):
        found += frames.feed(data[begin:end])

    assert found == messages


def test_a_message_larger_than_any_buffer_is_waited_for(ends: tuple[Channel, Channel]) -> None:
    message = Abort(tuple(map(str, range(200_000))))
    sender = threading.Thread(target=ends[0].send, args=(message,))
    sender.start()

    assert ends[1].receive() == message
    sender.join()


def test_a_channel_whose_other_end_is_closed_says_so(ends: tuple[Channel, Channel]) -> None:
    ends[1].connection.close()

    with pytest.raises(ChannelClosedError):
        ends[0].receive()
    with pytest.raises(ChannelClosedError):
        ends[0].send(Ask())


def test_waiting_ends_when_something_comes(ends: tuple[Channel, Channel]) -> None:
    assert not ends[0].wait(0.01)

    ends[1].send(Ask())

    assert ends[0].wait(60.0)


@pytest.mark.parametrize(
    "error",
    [RequestError("too long", param="prompt", http_status=413), SpecError("here", "is wrong", "do right")],
)
def test_errors_of_ours_are_sent_as_they_are(error: AotGaudiError) -> None:
    sent = sendable(error)

    assert sent is error
    (found,) = Frames().feed(frame(sent))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
