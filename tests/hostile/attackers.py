"""What ill-meaning clients do, each a function of the server's port that ends by itself, on plain sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

HOST = "127.0.0.1"
SOURCE = "127.0.0.2"
"""Where attackers come from: another address than the witnesses', so a proxy can tell them apart."""
ANSWER_SECONDS = 55.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def head(path: str, length: int, *more: str) -> bytes:
    """The head of a POST of JSON."""
    lines = (f"POST {path} HTTP/1.1", f"Host: {HOST}", "Content-Type: application/json", *more)
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


def post(path: str, body: object) -> bytes:
    """A whole POST of JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, len(data)) + data


def connect(port: int, timeout_seconds: float = 5.0) -> socket.socket | None:
    """Returns a connection, or None where there is none to be had."""
    with suppress(OSError):
        return socket.create_connection((HOST, port), timeout_seconds, (SOURCE, 0))
    return None


def answer(connection: socket.socket, seconds: float = 30.0) -> bytes:
    """Returns what comes until the server closes, or until `seconds` are over."""
    received, deadline = b"", time.monotonic() + seconds
    with suppress(OSError):
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (data := connection.recv(1 << 16)):
                break
            received += data
    return received


def say(port: int, data: bytes, seconds: float = 30.0) -> bytes:
    """Sends `data` on a new connection; returns what comes back; see `answer`."""
    if (connection := connect(port)) is None:
        return b""
    with connection:
        with suppress(OSError):
            connection.sendall(data)
        return answer(connection, seconds)


def say_often(port: int, data: bytes, times: int) -> None:
    """Sends `data` on one new connection after the other (M8)."""
    for _ in range(times):
        say(port, data, 2)


def status_of(received: bytes) -> int:
    """The status of the first answer in `received`; 0: none."""
    words = received.split(None, 2)[:2]
    return int(words[1]) if len(words) == 2 and words[1].isdigit() else 0


def _crowd(coroutines: Sequence[Any]) -> list[Any]:
    async def together() -> list[Any]:
        return list(await asyncio.gather(*coroutines, return_exceptions=True))

    return asyncio.run(together())


def vanish(port: int, num_connections: int, body: dict[str, Any], linger_seconds: float) -> None:
    """Sends one request on each connection, then closes all of them, unread, in random order (H1)."""
    data, held = post(COMPLETIONS, body), []
    deadline = time.monotonic() + linger_seconds
    for _ in range(num_connections):
        if time.monotonic() > deadline:
            break
        if (connection := connect(port)) is not None:
            with suppress(OSError):
                connection.sendall(data)
            held.append(connection)
    time.sleep(max(0.0, deadline - time.monotonic()))
    random.Random(1).shuffle(held)
    for connection in held:
        connection.close()


def flood(port: int, num_requests: int, body: dict[str, Any], allowed: Sequence[int]) -> None:
    """Sends many single requests at once; each must be answered, with an allowed status (H1)."""
    data = post(COMPLETIONS, body).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    gate = asyncio.Semaphore(2000)

    async def one() -> int:
        async with gate:
            reader, writer = await asyncio.open_connection(HOST, port, local_addr=(SOURCE, 0))
            writer.write(data)
            received = await asyncio.wait_for(reader.read(), 120)
            writer.close()
            return status_of(received)

    results = Counter(
        x if isinstance(x, int) else repr(x)[:80] for x in _crowd([one() for _ in range(num_requests)])
    )
    print(f"flood: {dict(results)}", flush=True)
    wrong = [result for result in results if result not in allowed]
    assert not wrong, results


def hold(port: int, num_connections: int, sent: bytes, seconds: float, drip: bytes = b"") -> None:
    """Opens connections, sends `sent` on each and then `drip` every second; ends when all are closed, or after `seconds`.

    Raises:
        AssertionError: some were still open then.
    """
    held = []
    deadline = time.monotonic() + seconds
    for _ in range(num_connections):
        if (connection := connect(port, 0.5)) is not None:
            with suppress(OSError):
                connection.settimeout(2)
                connection.sendall(sent)
            connection.setblocking(False)
            held.append(connection)
    while held and time.monotonic() < deadline:
        time.sleep(1)
        held = [connection for connection in held if is_open(connection, drip)]
    assert not held, f"{len(held)} of {num_connections} connections are open after {seconds:g} s"


def occupy(port: int, num_connections: int, seconds: float) -> None:
    """Holds idle connections, as many as the server accepts, for `seconds`, and opens new ones for those that it closes."""
    held: list[socket.socket] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        held = [connection for connection in held if is_open(connection)]
        for _ in range(num_connections - len(held)):
            if (connection := connect(port, 0.2)) is None:
                break
            connection.setblocking(False)
            held.append(connection)
        time.sleep(0.1)


def is_open(connection: socket.socket, drip: bytes = b"") -> bool:
    """Whether the server has not closed `connection`; sends `drip` to find out."""
    try:
        if drip:
            connection.send(drip)
        while data := connection.recv(1 << 16):
            del data
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


def repeat(port: int, path: str, body: bytes, seconds: float, allowed: Sequence[int]) -> None:
    """Posts the same body again and again, one at a time (H4)."""
    data = post(path, body)
    deadline = time.monotonic() + seconds
    data = data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    results: Counter[int] = Counter()
    while time.monotonic() < deadline:
        results[status_of(say(port, data, ANSWER_SECONDS))] += 1
        time.sleep(0.01)
    print(f"repeat: {dict(results)}", flush=True)
    assert set(results) <= {*allowed}, results


Refused = tuple[bytes, "str | None", str]
"""A body, and what its refusal names: a parameter (None: none can be), and words of the message."""


def ask_for_grammars(
    port: int,
    refused: Sequence[tuple[str, Refused]],
    taken: Sequence[tuple[str, bytes]],
    seconds: float,
) -> None:
    """Posts bodies with hostile grammars, one at a time, in an order of its own; each pair has the path first.

    Raises:
        AssertionError: one that must be refused was not, or not by what is wrong with it; or another got no answer.
    """
    deadline, found = time.monotonic() + seconds, Counter[str]()
    orders = [("refused", path, *rest) for path, rest in refused] + [
        ("taken", path, body, None, "") for path, body in taken
    ]
    random.Random(os.getpid()).shuffle(orders)
    for kind, path, body, param, words in itertools.cycle(orders):
        if time.monotonic() > deadline:
            break
        data = post(path, body).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        begun = time.monotonic()
        received = say(port, data, ANSWER_SECONDS)
        status = status_of(received)
        text = received.partition(b"\r\n\r\n")[2].decode()
        found[f"{kind} {status}"] += 1
        print(f"{status} {time.monotonic() - begun:.2f} s {body[:100]!r} {text[:200]}", flush=True)
        if status in (429, 503):
            continue
        assert status in ((400,) if kind == "refused" else (200, 400)), (status, body[:300], text[:300])
        if status == 400:
            error = json.loads(text)["error"]
            assert words in error["message"], (words, error, body[:300])
            assert kind == "taken" or error["param"] == param, (param, error, body[:300])
            assert len(error["message"]) < 1000, error
    print(f"grammars: {dict(found)}", flush=True)


def never_read(port: int, num_connections: int, body: dict[str, Any], seconds: float) -> None:
    """Asks for streams with the smallest receive buffer, and reads none of them (M10)."""
    held = []
    for _ in range(num_connections):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.bind((SOURCE, 0))
        connection.connect((HOST, port))
        connection.sendall(post(COMPLETIONS, {**body, "stream": True}))
        held.append(connection)
    time.sleep(seconds)
