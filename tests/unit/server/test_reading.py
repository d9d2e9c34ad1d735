"""Reading bodies, within the bytes that admission grants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.requests import Request

from aotgaudi.engine.admission import Admission
from aotgaudi.engine.limits import AdmissionLimits
from aotgaudi.errors import RequestError
from aotgaudi.server.http import BodyReader, ClientGoneError
from tests.unit.server.conftest import RULES

SMALL = 16 * 1024


def request(*chunks: bytes, is_whole: bool = True) -> Request:
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b""} if is_whole else {"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    return Request(scope, receive)


def _reader() -> BodyReader:
    return BodyReader(Admission(RULES, AdmissionLimits(max_body_bytes=100_000)), 100_000)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_what_is_held_is_limited_over_all_requests_and_small_bodies_are_always_taken() -> None:
    async def scenario() -> None:
        reader = _reader()
        async with AsyncExitStack() as held:
            for _ in range(2):
                raw = await held.enter_async_context(reader.json_bytes(request(b"a" * 30_000, b"b" * 20_000)))
                assert len(raw) == 50_000

            with pytest.raises(RequestError, match="as many bytes of requests as it can") as refused:
                await held.enter_async_context(reader.json_bytes(request(b"a" * SMALL, b"b")))
            assert refused.value.http_status == 429
            assert await held.enter_async_context(reader.json_bytes(request(b"a" * SMALL))) == b"a" * SMALL

        async with reader.json_bytes(request(b"a" * 100_000)) as raw:
            assert len(raw) == 100_000

    run(scenario)


def test_what_is_refused_or_breaks_off_is_not_held() -> None:
    async def scenario() -> None:
        reader = _reader()
        for _ in range(3):
            with pytest.raises(ClientGoneError):
                async with reader.json_bytes(request(b"a" * 90_000, is_whole=False)):
                    raise AssertionError
            with pytest.raises(RequestError, match="larger than 100000 bytes"):
                async with reader.json_bytes(request(b"a" * 90_000, b"a" * 90_000)):
                    raise AssertionError
            with pytest.raises(ZeroDivisionError):
                async with reader.json_bytes(request(b"a" * 90_000)):
                    raise ZeroDivisionError

        async with reader.json_bytes(request(b"a" * 100_000)) as raw:
            assert len(raw) == 100_000

    run(scenario)
