"""Streams: one event for each piece of text, and as few writes as there can be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.output import Event, TokenEvent
from aotgaudi.server.generation import Generation
from aotgaudi.server.http import DONE, sse
from aotgaudi.server.responses import (
    AnswerFormat,
    AnswerHead,
    ChatFormat,
    ChunkWriter,
    CompletionFormat,
    stream,
)
from aotgaudi.server.service import Service
from tests.unit.server.conftest import prepared

HEAD = AnswerHead(id="cmpl-1", created=7, model='a "text" of\x1f\u2028', system_fingerprint="f")
FORMATS: list[Callable[[AnswerHead], AnswerFormat]] = [CompletionFormat, ChatFormat]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["\x85", "\u2028\u2029", '"\\', "\x00text\x00", "\n\r\t", "\U0001f600"]
)


def piece(text: str, name: str = "r-0", **fields: object) -> TokenEvent:
    return TokenEvent(request_id=name, text=text, token_ids=(1,), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", FORMATS)
@given(texts=st.lists(texts, min_size=1, max_size=4), index=st.integers(0, 3))
def test_a_chunk_is_what_the_format_says(
    make: Callable[[AnswerHead], AnswerFormat], texts: list[str], index: int
) -> None:
    written, plain = ChunkWriter(make(HEAD)), make(HEAD)
    written.chunk(index, piece(""))

    for text in texts:
        event = piece(text)
        assert written.chunk(index, event) == b"".join(map(sse, plain.chunks(index, event)))
    last = piece("", finish_reason="stop")
    assert written.chunk(index, last) == b"".join(map(sse, plain.chunks(index, last)))


class Engine:
    """Takes requests, and lets the test say what comes."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def add(self, *_: object, **__: object) -> None: ...

    def abort(self, *_: object) -> None: ...

    def generation(self, name: str = "r", choices: int = 1) -> Generation:
        generation = Generation(self, name, self.service.metrics, self.service.clock)  # type: ignore[arg-type]
        generation.submit(prepared(*[[1]] * choices))
        return generation

    def step(self, *events: tuple[Generation, Event]) -> None:
        for generation, event in events:
            generation._on_event(event)


@pytest.fixture
def fake(service: Service) -> Engine:
    return Engine(service)


async def writes(generation: Generation) -> list[list[str]]:
    """The texts of each write."""
    found = []
    async for data in stream(generation, ChunkWriter(CompletionFormat(HEAD), generation.prompt_lens)):
        blocks = data.removesuffix(DONE).decode().split("\n\n")[:-1]
        bodies = [json.loads(block.removeprefix("data: ")) for block in blocks]
        found.append([body["choices"][0]["text"] if "choices" in body else "error" for body in bodies])
    return found


def test_what_has_come_together_is_written_together(fake: Engine) -> None:
    async def run() -> list[list[str]]:
        generation = fake.generation()
        fake.step(*((generation, piece(text)) for text in "abc"))
        fake.step((generation, piece("", finish_reason="stop")))
        return await writes(generation)

    assert asyncio.run(run()) == [["a", "b", "c", ""]]


def test_the_roles_come_with_the_first_output_of_any_choice(fake: Engine) -> None:
    """As with vLLM, so that load tools measure when the first token really comes."""

    async def run() -> list[list[tuple[int, object]]]:
        generation, found = fake.generation(choices=2), []
        answer = aiter(stream(generation, ChunkWriter(ChatFormat(HEAD), generation.prompt_lens)))
        waiting = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        assert not waiting.done()
        fake.step((generation, piece("b", "r-1")))
        for data in (await waiting,):
            blocks = [json.loads(block[6:]) for block in data.decode().split("\n\n")[:-1]]
            found.append([(c["index"], c["delta"]) for block in blocks for c in block["choices"]])
        await answer.aclose()
        return found

    role = {"role": "assistant", "content": ""}
    assert asyncio.run(run()) == [[(0, role), (1, role), (1, {"content": "b"})]]


def test_much_that_waits_is_written_in_parts(fake: Engine) -> None:
    async def run() -> list[list[str]]:
        generation = fake.generation()
        for _ in range(1000):
            fake.step((generation, piece("x")))
        fake.step((generation, piece("", finish_reason="length")))
        return await writes(generation)

    found = asyncio.run(run())

    assert sum(map(len, found)) == 1001
    assert 1 < len(found) < 10
