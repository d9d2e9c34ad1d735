"""How much an event loop takes from the kernel in one turn."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, closing

import pytest

from aotgaudi.server.front import turns
from aotgaudi.server.front.turns import event_loop


def test_all_are_read_in_turn_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_MAX_EVENTS", 8)
    read: list[int] = []

    async def use(stack: ExitStack) -> list[int]:
        loop, sizes = asyncio.get_running_loop(), []
        for number in range(50):
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            theirs.send(b"a")  # It stays unread: ready in each turn.
            loop.add_reader(ours, read.append, number)
        for _ in range(12):
            before = len(read)
            await asyncio.sleep(0)
            sizes.append(len(read) - before)
        return sizes

    with ExitStack() as stack, closing(event_loop()) as loop:
        sizes = loop.run_until_complete(use(stack))

    assert max(sizes) <= 8
    assert set(read) == set(range(50))


def test_a_loop_waits_reads_and_writes_as_any() -> None:
    async def use() -> bytes:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        other_reader, other = await asyncio.open_connection(sock=theirs)
        asyncio.get_running_loop().call_later(0.01, other.write, os.urandom(1 << 20))
        writer.write(bytes(1 << 20))
        received = await reader.readexactly(1 << 20)
        assert await other_reader.readexactly(1 << 20) == bytes(1 << 20)
        writer.close()
        assert await other_reader.read() == b""
        other.close()
        return received

    with closing(event_loop()) as loop:
        assert len(loop.run_until_complete(use())) == 1 << 20
