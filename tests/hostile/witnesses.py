"""Eight well-behaved clients, a monitor that asks for ``/health``, and a scale, in a process beside the attackers'.

Figures are of the time since the last `Watch.cut`: the same clients give the quiet ones and those under attack.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

NUM_WITNESSES = 8
PAUSE_SECONDS = 0.1
PERIOD_SECONDS = 0.05
DOZE_SECONDS = 0.01
TIMEOUT_SECONDS = 30.0
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0},
    {"prompt": [9] * 17, "max_tokens": 8, "temperature": 1, "seed": 7},
    {"prompt": "seven wizards", "max_tokens": 8, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 1},
    {"prompt": list(range(1, 16)), "max_tokens": 8, "temperature": 0, "ignore_eos": True},
)


AnswerT = TypeVar("AnswerT")


@dataclass
class Figures:
    """What was seen. Times are in seconds, from the first attempt on, however often it was refused or cut off."""

    first_token: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    num_refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        """Takes in what was seen later."""
        self.first_token += other.first_token
        self.health += other.health
        self.late += other.late
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.num_refused += other.num_refused
        self.wrong += other.wrong

    @property
    def first_token_p99(self) -> float:
        """See `p99`."""
        return p99(self.first_token)

    @property
    def health_p99(self) -> float:
        """See `p99`."""
        return p99(self.health)

    @property
    def late_p99(self) -> float:
        """How late the machine woke the witnesses themselves: what its other work adds to any time. See `p99`."""
        return p99(self.late)


def p99(values: Sequence[float]) -> float:
    """The value that one in a hundred exceeds; infinite where there is none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))] if values else float("inf")


class Watch:
    """The parent's end of the process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def cut(self) -> Figures:
        """Returns what was seen since the last cut. What still waits for its first token counts as if it came now."""
        self._pipe.send("cut")
        if not self._pipe.poll(TIMEOUT_SECONDS):
            raise AssertionError("the witnesses do not answer")
        figures = self._pipe.recv()
        assert isinstance(figures, Figures)
        return figures


@contextmanager
def watching(base_url: str, pid: int) -> Iterator[Watch]:
    """Starts the witnesses of the server at `base_url`, whose process is `pid`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_watch, args=(base_url, pid, theirs), daemon=True)
    process.start()
    try:
        yield Watch(ours)
    finally:
        process.kill()
        process.join()


def _watch(base_url: str, pid: int, pipe: Connection) -> None:
    asyncio.run(_Witnesses(base_url, pid).run(pipe))


class _Witnesses:
    def __init__(self, base_url: str, pid: int) -> None:
        self._base_url, self._server = base_url, psutil.Process(pid)
        self._figures = Figures()
        self._answers: list[str] = []
        self._asked: dict[int, float] = {}
        self._asked_health: float | None = None

    async def run(self, pipe: Connection) -> None:
        async with self._client() as client:
            self._answers = [(await self._ask(client, body))[1] for body in QUESTIONS]
        tasks = [asyncio.create_task(self._witness(number)) for number in range(NUM_WITNESSES)]
        tasks += [
            asyncio.create_task(self._monitor()),
            asyncio.create_task(self._weigh()),
            asyncio.create_task(self._doze()),
        ]
        loop = asyncio.get_running_loop()
        while True:
            await loop.run_in_executor(None, pipe.recv)
            for task in tasks:
                if task.done():
                    task.result()
            pipe.send(self._cut())

    def _cut(self) -> Figures:
        now, figures = time.monotonic(), self._figures
        figures.first_token += [now - asked for asked in self._asked.values()]
        figures.health += [now - self._asked_health] if self._asked_health else []
        self._figures = Figures()
        return figures

    def _client(self, *, is_kept: bool = True) -> httpx.AsyncClient:
        """A client that keeps its connection, or opens one for each request: making clients would be the slowest part."""
        limits = httpx.Limits(max_keepalive_connections=1 if is_kept else 0)
        return httpx.AsyncClient(base_url=self._base_url, timeout=TIMEOUT_SECONDS, limits=limits)

    async def _witness(self, number: int) -> None:
        """Half of them keep their connection, half open one for each request."""
        async with self._client(is_kept=_is_kept(number)) as client:
            while True:
                for question, answer in zip(QUESTIONS, self._answers, strict=True):
                    await self._question(number, client, question, answer)
                    await asyncio.sleep(PAUSE_SECONDS)

    async def _question(
        self, number: int, client: httpx.AsyncClient, body: dict[str, Any], answer: str
    ) -> None:
        asked = self._asked[number] = time.monotonic()
        first, text = await self._persist(lambda: self._ask(client, body))
        self._asked.pop(number)
        self._figures.first_token.append(first - asked)
        if text != answer:
            self._figures.wrong.append(f"{body} gave {text!r}, alone {answer!r}")

    async def _persist(self, ask: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Asks until there is an answer, as a client does that honours ``Retry-After``."""
        while True:
            try:
                return await ask()
            except _RefusedError as error:
                self._figures.num_refused += 1
                await asyncio.sleep(error.retry_after)
            except httpx.TransportError:
                self._figures.num_refused += 1
                await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, str]:
        """Returns when the first token came, and the text."""
        first, text, is_whole = 0.0, "", False
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code in (429, 503):
                raise _RefusedError(float(response.headers.get("retry-after", "1")))
            if response.status_code != 200:
                return time.monotonic(), f"status {response.status_code}: {await response.aread()!r}"
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.monotonic()
                    event = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in event.get("choices", [event]))
                is_whole = is_whole or line == "data: [DONE]"  # Who stops reading here loses the connection.
        return (first, text) if is_whole else (time.monotonic(), f"{text} without an end")

    async def _monitor(self) -> None:
        """Asks for /health on a connection of its own each time, as probes do."""
        async with self._client(is_kept=False) as client:
            while True:
                self._asked_health = time.monotonic()
                await self._persist(lambda: self._health(client))
                self._figures.health.append(time.monotonic() - self._asked_health)
                self._asked_health = None
                await asyncio.sleep(PERIOD_SECONDS)

    async def _health(self, client: httpx.AsyncClient) -> None:
        response = await client.get("/health")
        if response.status_code != 200:
            raise _RefusedError(PERIOD_SECONDS)

    async def _doze(self) -> None:
        while True:
            due = time.monotonic() + DOZE_SECONDS
            await asyncio.sleep(DOZE_SECONDS)
            self._figures.late.append(time.monotonic() - due)

    async def _weigh(self) -> None:
        while True:
            self._figures.peak_bytes = max(self._figures.peak_bytes, tree_bytes(self._server))
            await asyncio.sleep(PERIOD_SECONDS)


def _is_kept(number: int) -> bool:
    return bool(number % 2)


def tree_bytes(server: psutil.Process) -> int:
    """The memory of a process and its children, each page that they share counted once (PSS, proc(5))."""
    total = 0
    for process in (server, *server.children(recursive=True)):
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue  # It has ended.
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total * 1024


class _RefusedError(Exception):
    def __init__(self, retry_after: float) -> None:
        self.retry_after = retry_after
