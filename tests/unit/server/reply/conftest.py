"""The official client of a server whose model says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import openai
import pytest

from aotgaudi.engine.output import TokenEvent
from aotgaudi.server.app import create_app
from aotgaudi.server.options import ReplyParsers
from aotgaudi.server.service import Service
from tests.unit.server.conftest import token

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }} {{ call.id }}</call>{% endfor %}"
    "{% if message.tool_call_id %}<for {{ message.tool_call_id }}>{% endif %}\n{% endfor %}<assistant>"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How is Oslo?"}]
Ask = Callable[[Callable[[openai.AsyncOpenAI], Awaitable[Any]]], Any]


@pytest.fixture
def say(engine) -> Callable[..., None]:
    """Has the engine say a text, in pieces of so many characters."""

    def set_script(text: str, *, size: int = 3, reason: str = "stop") -> None:
        pieces = [text[start : start + size] for start in range(0, len(text), size)] or [""]

        def script(request_id: str) -> Sequence[TokenEvent]:
            events = [token(request_id, piece, number) for number, piece in enumerate(pieces)]
            return [*events, token(request_id, "", 0, finish_reason=reason)]

        engine.script = script

    engine._check = lambda *_: None  # Prompts with tools are long.
    return set_script


@pytest.fixture
def make_client(make_service: Callable[..., Service]) -> Callable[..., Ask]:
    """Makes what asks a server with the official client."""

    def make(template: str = TEMPLATE, **parsers: Any) -> Ask:
        app = create_app(make_service(template, 4096, parsers=ReplyParsers(**parsers)))

        def ask(question: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
            async def run() -> Any:
                transport = httpx.ASGITransport(app)
                async with (
                    httpx.AsyncClient(transport=transport) as http,
                    openai.AsyncOpenAI(
                        base_url="http://server/v1", api_key="none", http_client=http, max_retries=0
                    ) as client,
                ):
                    return await question(client)

            return asyncio.run(run())

        return ask

    return make


@pytest.fixture
def prompt(engine) -> Callable[[], str]:
    """The newest prompt that the engine got, as text: the tests' tokenizer has a token a byte."""

    def text() -> str:
        from aotgaudi.llm.tokenizer import Tokenizer
        from tests.unit.llm.conftest import make_backend

        return Tokenizer(make_backend()).decode(engine.added[-1].token_ids)

    return text
