"""Which requests may be refused unparsed, and that a parser reads the same."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.server.front.refusals import FULL, FULL_AND_CLOSED, refusal_of
from aotgaudi.server.front.strict import StrictReader

START = b"POST /v1/completions HTTP/1.1\r\n"
HOST, LENGTH = b"Host: a\r\n", b"Content-Length: 2\r\n"


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (START + HOST + LENGTH + b"\r\n{}", FULL),
        (START + LENGTH.upper() + b"Connection: keep-alive\r\n\r\n{}", FULL),
        (START + HOST + LENGTH + b"Connection: close\r\n\r\n{}", FULL_AND_CLOSED),
        (START + HOST + b"Content-Length: 0\r\n\r\n", FULL),
    ],
)
def test_a_whole_request_is_refused_as_it_is(data: bytes, refusal: bytes) -> None:
    assert refusal_of(data) is refusal


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        START + HOST + LENGTH,
        START + HOST + LENGTH + b"\r\n{",
        START + HOST + LENGTH + b"\r\n{}G",
        START + HOST + b"\r\n",
        START + HOST + LENGTH + LENGTH + b"\r\n{}",
        START + HOST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n{}",
        START + HOST + b"Content-Length : 2\r\n\r\n{}",
        START + HOST + b"X: a\r\n " + LENGTH + b"\r\n{}",
        START + HOST + b"X: a\n" + LENGTH + b"\r\n{}",
        START + HOST + LENGTH + b"Expect: 100-continue\r\n\r\n{}",
        START + HOST + LENGTH + b"Upgrade: h2c\r\n\r\n{}",
        START.replace(b"1.1", b"1.0") + HOST + LENGTH + b"\r\n{}",
        b"\x16\x03\x01" + LENGTH + b"\r\n{}",
    ],
)
def test_anything_else_must_be_read(data: bytes) -> None:
    assert refusal_of(data) is None


_LINES = st.sampled_from(
    [
        HOST,
        LENGTH,
        b"content-length:  2 \r\n",
        b"Content-Length: 02\r\n",
        b"Content-Length: +2\r\n",
        b"Content-Length: 2, 2\r\n",
        b"X-Content-Length: 2\r\n",
        b"X: content-length: 2\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"Connection: Keep-Alive, Close\r\n",
        b"X: \r\n",
        b"X\r\n",
        b"\tX: a\r\n",
        b"X: a\n",
        b"\r",
        b"X: a\r\r\n",
        b"\0: a\r\n",
    ]
)


@given(
    st.sampled_from([START, b"PUT * HTTP/1.1\r\n", b"POST / HTTP/1.0\r\n", b"POST /\r\n"]),
    st.lists(_LINES, max_size=5),
    st.sampled_from([b"", b"{}", b"{}P", b"\r\n"]),
)
def test_where_a_parser_ends_a_request_there_it_was_refused(
    start: bytes, lines: list[bytes], body: bytes
) -> None:
    """What is skipped is exactly one request, to a parser that takes it: else what follows could be read as another."""
    data = start + b"".join(lines) + b"\r\n" + body
    refusal = refusal_of(data)
    if refusal is None:
        return
    reader = StrictReader()
    reader.receive_data(data)
    try:
        while type(reader.next_event()) is not h11.EndOfMessage:
            assert reader.their_state is h11.SEND_BODY
    except h11.RemoteProtocolError:
        return  # It would have been answered with 400, and the connection closed.

    assert reader.trailing_data == (b"", False)
    assert (refusal is FULL_AND_CLOSED) or reader.their_state is h11.DONE
