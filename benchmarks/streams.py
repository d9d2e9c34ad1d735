"""Streaming completions as a client sees them: when each event came, over plain HTTP, many at a time.

While requests run, the client keeps only the bytes and when they came; what they say is read afterwards, so that it takes as
little as it can of the cores that it shares with the server.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h11

TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """One stream. `token_times` has the time of each event that carried tokens (perf_counter), ascending."""

    sent_at: float
    token_times: tuple[float, ...]
    num_tokens: int
    text: str

    @property
    def first_token_seconds(self) -> float:
        """From the request to the first token."""
        return self.token_times[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """The seconds between one event and the next."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    def tokens_within(self, begin: float, end: float) -> float:
        """How many tokens came after `begin` and up to `end`; where an event has several, each has equally many."""
        count = sum(begin < at <= end for at in self.token_times)
        return count * self.num_tokens / len(self.token_times)


@dataclass(frozen=True)
class Turn:
    """Requests of one client, each sent when the one before has been answered; the first after `delay_seconds`."""

    bodies: tuple[Mapping[str, Any], ...]
    delay_seconds: float = 0.0


def stream_all(port: int, turns: Sequence[Turn]) -> list[list[Answer]]:
    """Runs all clients at once. Returns the answers of each; raises RuntimeError where one is not a whole stream."""
    gc.collect()
    gc.disable()
    try:
        raw = asyncio.run(asyncio.wait_for(_run(port, turns), TIMEOUT_SECONDS))
    finally:
        gc.enable()
    return [[_read(received) for received in client] for client in raw]


async def _run(port: int, turns: Sequence[Turn]) -> list[list[_Received]]:
    async def client(turn: Turn) -> list[_Received]:
        await asyncio.sleep(turn.delay_seconds)
        return [await _send(port, body) for body in turn.bodies]

    return list(await asyncio.gather(*map(client, turns)))


class _Received(asyncio.Protocol):
    """Sends one request, and keeps what comes with the time when it came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.sent_at = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.sent_at = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


async def _send(port: int, body: Mapping[str, Any]) -> _Received:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    _, received = await loop.create_connection(lambda: _Received(head.encode() + content), "127.0.0.1", port)
    await received.is_over
    return received


def _read(received: _Received) -> Answer:
    times: list[float] = []
    text, num_tokens = "", 0
    for at, event in _events(received.pieces):
        num_tokens = (event.get("usage") or {}).get("completion_tokens") or num_tokens
        for choice in event.get("choices", ()):
            text += choice.get("text") or ""
            # A last event that only says why it ended carries no token; one before it may have tokens and no text yet.
            if choice.get("text") or not choice.get("finish_reason"):
                times.append(at)
    if not times or not num_tokens:
        raise RuntimeError(f"not a whole stream: {b''.join(data for _, data in received.pieces)[-500:]!r}")
    return Answer(received.sent_at, tuple(times), num_tokens, text)


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON of each server-sent event, at the time when its last byte came."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "a"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    pending = b""
    for at, piece in pieces:
        connection.receive_data(piece)
        while isinstance(
            part := connection.next_event(), (h11.Response, h11.Data, h11.InformationalResponse)
        ):
            if isinstance(part, h11.Response) and part.status_code != 200:
                raise RuntimeError(f"{part.status_code}: {b''.join(data for _, data in pieces)[-500:]!r}")
            if isinstance(part, h11.Data):
                pending += bytes(part.data)
        *whole, pending = pending.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            content = event.removeprefix(b"data:").strip()
            if content and not content.startswith((b":", b"[DONE]")):
                yield at, json.loads(content)
