"""What the front answers by itself, before there is a request for the application: made once, and sent as it is."""

from __future__ import annotations

import json
import re
from http import HTTPStatus

from aotgaudi.server.http import error_body

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n")
_UNUSUAL = re.compile(rb"transfer-encoding|\r\n(?:expect|upgrade)|\n[ \t]|[^\r]\n")
_CLOSES = re.compile(rb"\r\nconnection:[^\r]*close")


def refusal(status: int, message: str, *, closes: bool) -> bytes:
    """Returns a whole answer that sends the client away for a second. `closes`: the connection ends with it."""
    body = json.dumps(error_body(status, message)).encode()
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        + "Connection: close\r\n" * closes
        + f"Retry-After: 1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


_FULL = "The server is full: as much waits or runs as it takes; try again soon"
FULL, FULL_AND_CLOSED = (refusal(429, _FULL, closes=closes) for closes in (False, True))


def refusal_of(data: bytes) -> bytes | None:
    """Returns how to refuse the one request that `data` is, without parsing it, where the server is full.

    None where `data` is not a whole request, or more than one, or where it takes a parser to tell: then it must be read.
    That leaves requests of HTTP/1.1 in lines that end as they should, with one ``Content-Length``, which is true (RFC
    9112, 6.3).
    """
    end = data.find(b"\r\n\r\n")
    head = data[: end + 2].lower()
    if not head[: head.find(b"\r\n")].endswith(b" http/1.1") or _UNUSUAL.search(head):
        return None
    lengths = _LENGTH.findall(head)
    if len(lengths) != 1 or head.count(b"content-length") != 1 or int(lengths[0]) != len(data) - end - 4:
        return None
    return FULL_AND_CLOSED if _CLOSES.search(head) else FULL
