"""What is sent is what h11 sends, though chunks take a shorter way."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.server.front.strict import StrictReader

REQUESTS = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.0": b"GET / HTTP/1.0\r\n\r\n",
    "HEAD": b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
}


def sent(connection: h11.Connection, request: bytes, length: int | None, chunks: list[bytes]) -> bytes:
    connection.receive_data(request)
    connection.next_event()
    headers = [] if length is None else [("content-length", str(length))]
    events: list[h11.Event] = [h11.Response(status_code=200, headers=headers, reason=b"OK")]
    events += [h11.Data(data=chunk) for chunk in chunks]
    return b"".join(connection.send(event) or b"" for event in [*events, h11.EndOfMessage()])


@given(
    name=st.sampled_from(sorted(REQUESTS)),
    chunks=st.lists(st.binary(max_size=40) | st.just(bytes(300)), max_size=5),
    is_chunked=st.booleans(),
)
def test_answers_are_those_of_h11(name: str, chunks: list[bytes], is_chunked: bool) -> None:
    chunks = [] if name == "HEAD" else chunks
    length = None if is_chunked else sum(map(len, chunks))

    ours = sent(StrictReader(), REQUESTS[name], length, chunks)

    assert ours == sent(h11.Connection(h11.SERVER), REQUESTS[name], length, chunks)


def test_a_chunk_out_of_turn_is_refused() -> None:
    connection = StrictReader()
    sent(connection, REQUESTS["HTTP/1.1"], None, [b"a"])

    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"b"))
