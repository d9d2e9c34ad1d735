"""LangChain and LlamaIndex chat, call tools and get structured output. `ci/frameworks` installs both and runs this."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pydantic
import pytest

from aotgaudi.server.options import ReplyParsers
from aotgaudi.server.service import Service
from tests.unit.server.conftest import serving
from tests.unit.server.reply.conftest import TEMPLATE

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class City(pydantic.BaseModel):
    """A city."""

    name: str
    num_people: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@pytest.fixture
def url(make_service: Callable[..., Service], say) -> Iterator[str]:
    """A server on a port: the frameworks bring clients of their own."""
    parsers = ReplyParsers(enable_auto_tool_choice=True, tool_call_parser="hermes")
    with serving(make_service(TEMPLATE, 8192, parsers=parsers)) as running:
        yield f"{running.url}/v1"


# LangChain


@pytest.fixture
def langchain(url: str) -> Any:
    found = pytest.importorskip("langchain_openai")
    return found.ChatOpenAI(
        model="tiny", base_url=url, api_key="none", max_retries=0, use_responses_api=False
    )


def test_langchain_chats(langchain: Any, say) -> None:
    say("It rains.")

    assert langchain.invoke("How is Oslo?").text == "It rains."
    assert "".join(chunk.text for chunk in langchain.stream("How is Oslo?")) == "It rains."


def test_langchain_calls_tools_and_sends_the_results(langchain: Any, say, prompt) -> None:
    say(CALL)
    model = langchain.bind_tools([get_weather])

    whole = model.invoke("How is Oslo?")
    first, *others = model.stream("How is Oslo?")
    streamed = first
    for chunk in others:
        streamed = streamed + chunk

    for message in (whole, streamed):
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    say("It rains.")
    result = {"role": "tool", "tool_call_id": whole.tool_calls[0]["id"], "content": "rain"}
    assert model.invoke([("user", "How is Oslo?"), whole, result]).text == "It rains."
    assert f"<tool>rain<for {whole.tool_calls[0]['id']}>" in prompt()


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(langchain: Any, say, engine, method: str) -> None:
    say('{"name": "Oslo", "num_people": 700000}')

    city = langchain.with_structured_output(City, method=method).invoke("Which city?")

    assert city == City(name="Oslo", num_people=700000)
    assert "num_people" in engine.added[-1].params.structured_outputs.json


# LlamaIndex


@pytest.fixture
def llama_index(url: str) -> Any:
    found = pytest.importorskip("llama_index.llms.openai_like")
    return found.OpenAILike(
        model="tiny",
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_retries=0,
    )


def test_llama_index_chats(llama_index: Any, say) -> None:
    from llama_index.core.llms import ChatMessage

    say("It rains.")
    asked = [ChatMessage(role="user", content="How is Oslo?")]

    assert llama_index.chat(asked).message.content == "It rains."
    assert "".join(chunk.delta for chunk in llama_index.stream_chat(asked)) == "It rains."


def test_llama_index_calls_tools(llama_index: Any, say) -> None:
    from llama_index.core.tools import FunctionTool

    say(CALL)
    tools = [FunctionTool.from_defaults(get_weather)]

    whole = llama_index.chat_with_tools(tools, user_msg="How is Oslo?")
    *_, streamed = llama_index.stream_chat_with_tools(tools, user_msg="How is Oslo?")

    for answer in (whole, streamed):
        (call,) = llama_index.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Oslo"})


def test_llama_index_answers_with_what_tools_said(llama_index: Any, say) -> None:
    from llama_index.core.tools import FunctionTool

    say(CALL)
    answer = llama_index.predict_and_call([FunctionTool.from_defaults(get_weather)], user_msg="How is Oslo?")

    assert answer.response == "rain in Oslo"


def test_llama_index_gets_structured_output(llama_index: Any, say, engine) -> None:
    from llama_index.core.llms import ChatMessage

    say('[{"name": "City", "parameters": {"name": "Oslo", "num_people": 700000}}]')

    answer = llama_index.as_structured_llm(City).chat([ChatMessage(role="user", content="Which city?")])

    assert answer.raw == City(name="Oslo", num_people=700000)
    assert "num_people" in engine.added[-1].params.structured_outputs.json
