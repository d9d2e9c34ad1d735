"""The official client works against a real server, for all that the server offers."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.harness import MAX_MODEL_LEN, Server

pytestmark = pytest.mark.slow


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_models_are_listed_and_described(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [server.model_name]
    assert client.models.retrieve(server.model_name).owned_by == "aotgaudi"


def test_a_completion_has_text_reason_and_usage(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(
        model=server.model_name,
        prompt=[1, 2, 3],
        max_tokens=9,
        temperature=0,
        extra_body={"ignore_eos": True, "top_k": 5},
    )

    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        9,
        12,
    )


def test_a_stream_gives_the_text_of_the_whole_answer_and_the_usage(
    client: openai.OpenAI, server: Server
) -> None:
    whole = client.completions.create(
        model=server.model_name, prompt="the quick", max_tokens=20, temperature=0
    )

    chunks = list(
        client.completions.create(
            model=server.model_name,
            prompt="the quick",
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_a_chat_is_answered_alike_whole_and_streamed(client: openai.OpenAI, server: Server) -> None:
    messages: list[dict[str, str]] = [
        {"role": "system", "content": "a dog"},
        {"role": "user", "content": "jumps?"},
    ]
    asked = {"model": server.model_name, "messages": messages, "max_completion_tokens": 16, "seed": 4}

    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))

    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert whole.choices[0].message.role == "assistant"
    assert pieces[0].delta.role == "assistant"
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 16


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=f"max_model_len = {MAX_MODEL_LEN}"):
        client.completions.create(model=server.model_name, prompt="a", max_tokens=MAX_MODEL_LEN)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-9", prompt="a")
