"""Reads the body of a request: JSON, and not too much of it."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from aotgaudi.errors import RequestError
from aotgaudi.server.streaming import ClientGoneError


async def read_json_bytes(request: Request, max_bytes: int) -> bytes:
    """The body, unparsed. Reads no more than `max_bytes` of it.

    Raises:
        RequestError: 415 for another content type than JSON, 413 for a body that is too large.
        ClientGoneError: the client went before it had sent everything.
    """
    _check_content_type(request.headers.get("content-type", ""))
    _check_declared_length(request.headers.get("content-length", ""), max_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def _check_content_type(value: str) -> None:
    media_type = value.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError("Content-Type must be 'application/json'", http_status=415)


def _check_declared_length(value: str, max_bytes: int) -> None:
    if value.isdecimal() and int(value[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"The body is larger than {max_bytes} bytes", http_status=413)
