"""The official client calls tools and reads reasoning, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from aotgaudi.spec.sampler import SamplerSpec
from tests.unit.server.reply.conftest import ASKED, WEATHER

HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def chat(**asked: Any) -> Callable[[openai.AsyncOpenAI], Any]:
    async def question(client: openai.AsyncOpenAI) -> ChatCompletion:
        return await client.chat.completions.create(model="tiny", **{"messages": ASKED, **asked})

    return question


def streamed(**asked: Any) -> Callable[[openai.AsyncOpenAI], Any]:
    async def question(client: openai.AsyncOpenAI) -> list[ChatCompletionChunk]:
        chunks = await client.chat.completions.create(
            model="tiny", stream=True, **{"messages": ASKED, **asked}
        )
        return [chunk async for chunk in chunks]

    return question


def gathered(**asked: Any) -> Callable[[openai.AsyncOpenAI], Any]:
    """What the client itself makes of a stream."""

    async def question(client: openai.AsyncOpenAI) -> ChatCompletion:
        async with client.chat.completions.stream(model="tiny", **{"messages": ASKED, **asked}) as stream:
            return await stream.get_final_completion()

    return question


def test_a_call_is_an_answer(make_client, say, prompt) -> None:
    say(f"Let me see.\n{CALL}")

    answer = make_client(**HERMES)(chat(tools=[WEATHER]))

    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert call.id.startswith("call_")
    assert '<tools>{"type": "function", "function": {"name": "get_weather", "description":' in prompt()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_has_the_name_first_and_then_the_arguments(make_client, say, size: int) -> None:
    say(f"{CALL}\n{CALL}", size=size)

    chunks = make_client(**HERMES)(streamed(tools=[WEATHER]))

    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    for index in (0, 1):
        first, *others = [call for call in deltas if call.index == index]
        assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", "")
        assert first.id
        assert all(call.id is None and call.function.name is None for call in others)
        assert "".join(call.function.arguments for call in others) == '{"city": "Oslo"}'
    assert deltas[0].id != next(call.id for call in deltas if call.index == 1)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_client_gathers_a_stream_to_the_whole_answer(make_client, say, size: int) -> None:
    say(f"Well. {CALL}{CALL}", size=size)
    ask = make_client(**HERMES)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}

    whole, stream = (ask(each(tools=[strict])).choices[0].message for each in (chat, gathered))

    assert stream.content == whole.content == "Well."
    assert [call.function.arguments for call in stream.tool_calls] == [
        call.function.arguments for call in whole.tool_calls
    ]
    assert stream.tool_calls[1].function.parsed_arguments == {"city": "Oslo"}


def test_the_round_trip_ends_with_an_answer(make_client, say, prompt) -> None:
    ask = make_client(**HERMES)
    say(CALL)
    called = ask(chat(tools=[WEATHER])).choices[0].message

    say("It rains.")
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "rain"}
    history = [*ASKED, called.model_dump(), result]
    answer = ask(chat(messages=history, tools=[WEATHER])).choices[0]

    assert (answer.finish_reason, answer.message.content) == ("stop", "It rains.")
    assert answer.message.tool_calls is None
    call_id = called.tool_calls[0].id
    assert f'<assistant><call>get_weather {{"city": "Oslo"}} {call_id}</call>' in prompt()
    assert f"<tool>rain<for {call_id}>" in prompt()


def test_arguments_that_were_cut_off_can_be_sent_back(make_client, say, prompt) -> None:
    ask = make_client(**HERMES)
    say('<tool_call>{"name": "get_weather", "arguments": {"city": "Os', reason="length")

    (choice,) = ask(chat(tools=[WEATHER])).choices
    ask(chat(messages=[*ASKED, choice.message.model_dump(), *ASKED], tools=[WEATHER]))

    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Os'
    assert r'<call>get_weather "{\"city\": \"Os"' in prompt()


@pytest.mark.parametrize("ask_with", [chat, gathered])
def test_what_is_no_call_is_content(make_client, say, ask_with) -> None:
    say("<tool_call>{'name': oops}</tool_call>")

    (choice,) = make_client(**HERMES)(ask_with(tools=[WEATHER])).choices

    assert (choice.finish_reason, choice.message.content) == ("stop", "<tool_call>{'name': oops}</tool_call>")
    assert choice.message.tool_calls is None


def test_nobody_calls_tools_where_the_client_wants_none(make_client, say, prompt) -> None:
    say(CALL)

    answer = make_client(**HERMES)(chat(tools=[WEATHER], tool_choice="none"))

    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None
    assert "get_weather" in prompt()


def test_one_call_at_a_time(make_client, say) -> None:
    say(CALL + CALL)

    answer = make_client(**HERMES)(chat(tools=[WEATHER], parallel_tool_calls=False))

    assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]'),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo"}'),
    ],
)
@pytest.mark.parametrize("ask_with", [chat, gathered])
def test_other_models_call_otherwise(make_client, say, parser: str, text: str, ask_with) -> None:
    say(text)

    answer = make_client(enable_auto_tool_choice=True, tool_call_parser=parser)(ask_with(tools=[WEATHER]))

    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert (len(call.id) == 9 and call.id.isalnum()) == (parser == "mistral")


def test_marks_of_calls_may_be_special_tokens(make_client, say, engine) -> None:
    say("hi")
    ask = make_client(**HERMES)

    ask(chat(tools=[WEATHER]))
    ask(chat())

    assert [added.params.skip_special_tokens for added in engine.added] == [False, True]


def test_each_choice_has_its_own_calls(make_client, say) -> None:
    say(CALL)
    ask = make_client(**HERMES)

    whole, stream = (ask(each(tools=[WEATHER], n=2)) for each in (chat, gathered))

    for answer in (whole, stream):
        calls = [choice.message.tool_calls for choice in answer.choices]
        assert [[call.function.arguments for call in made] for made in calls] == [['{"city": "Oslo"}']] * 2
        assert calls[0][0].id != calls[1][0].id


def test_a_server_that_was_not_told_how_to_call_says_so(make_client, say) -> None:
    say("hi")

    with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice and --tool-call-parser"):
        make_client(tool_call_parser="hermes")(chat(tools=[WEATHER]))
    assert make_client()(chat(tools=[WEATHER], tool_choice="none")).choices[0].message.content == "hi"


def test_reasoning_is_apart_whole_and_streamed(make_client, say) -> None:
    say("<think>\nOslo is north.\n</think>\n\nCold.")
    ask = make_client(reasoning_parser="qwen3")

    message = ask(chat()).choices[0].message
    chunks = ask(streamed())

    assert (message.content, message.reasoning, message.reasoning_content) == (
        "Cold.",
        "Oslo is north.",
        "Oslo is north.",
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Oslo is north."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Oslo is north."
    assert "".join(delta.content or "" for delta in deltas) == "Cold."


def test_usage_has_the_tokens_of_thoughts_whole_and_streamed(make_client, say) -> None:
    say("<think>aaabbb</think>Cold.", size=3)
    ask = make_client(reasoning_parser="deepseek_r1")

    whole = ask(chat(n=2)).usage
    chunks = ask(streamed(n=2, stream_options={"include_usage": True}))
    plain = make_client()(chat()).usage

    assert whole.completion_tokens_details.reasoning_tokens == 2 * 8
    assert chunks[-1].usage == whole
    assert plain.completion_tokens_details is None


def test_reasoning_that_was_cut_off_is_no_content(make_client, say) -> None:
    say("Oslo is", reason="length")

    (choice,) = make_client(reasoning_parser="deepseek_r1")(chat()).choices

    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == (
        "Oslo is",
        None,
        "length",
    )


def test_a_prompt_that_ends_thinking_has_no_reasoning(make_client, say) -> None:
    say("Cold.")
    template = "{{ messages[0].content }}<think>\n\n</think>\n\n"

    message = make_client(template, reasoning_parser="deepseek_r1")(chat()).choices[0].message

    assert (message.reasoning, message.content) == (None, "Cold.")


def test_a_client_may_leave_reasoning_out(make_client, say) -> None:
    say("Oslo is north.</think>Cold.")

    answer = make_client(reasoning_parser="deepseek_r1")(chat(extra_body={"include_reasoning": False}))

    assert (answer.choices[0].message.reasoning, answer.choices[0].message.content) == (None, "Cold.")


@pytest.mark.parametrize("ask_with", [chat, gathered])
def test_reasoning_comes_before_calls(make_client, say, prompt, ask_with) -> None:
    say(f"<think>north</think>\n{CALL}")
    ask = make_client(reasoning_parser="qwen3", **HERMES)

    choice = ask(ask_with(tools=[WEATHER])).choices[0]

    assert choice.message.reasoning == "north"
    assert not choice.message.content
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert choice.finish_reason == "tool_calls"
    ask(chat(messages=[*ASKED, choice.message.model_dump(), *ASKED]))
    assert "<assistant><think>north</think>" in prompt()


TIME = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("ask_with", [chat, gathered])
def test_a_certain_function_is_called_by_constraint(make_client, say, engine, ask_with) -> None:
    say('{"city": "Oslo"}')

    answer = make_client(reasoning_parser="deepseek_r1")(ask_with(tools=[TIME, WEATHER], tool_choice=NAMED))

    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert (choice.finish_reason, choice.message.content or None) == ("stop", None)
    schema = json.loads(engine.added[-1].params.structured_outputs.json)
    assert schema == WEATHER["function"]["parameters"]


@pytest.mark.parametrize("ask_with", [chat, gathered])
def test_some_function_is_called_by_constraint(make_client, say, engine, ask_with) -> None:
    say('[{"name": "get_time", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Oslo"}}]')

    answer = make_client()(ask_with(tools=[TIME, WEATHER], tool_choice="required"))

    (choice,) = answer.choices
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("get_time", "{}"),
        ("get_weather", '{"city": "Oslo"}'),
    ]
    assert choice.finish_reason == "tool_calls"
    schema = json.loads(engine.added[-1].params.structured_outputs.json)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid([{"name": "get_time", "parameters": {}}])
    assert validator.is_valid([{"name": "get_weather", "parameters": {"city": "a"}}] * 2)
    assert not validator.is_valid([])
    assert not validator.is_valid([{"name": "get_weather", "parameters": {}}])
    assert not validator.is_valid([{"name": "get_rain", "parameters": {}}])


def test_one_required_call_is_one(make_client, say, engine) -> None:
    say('[{"name": "get_time", "parameters": {}}]')

    make_client()(chat(tools=[TIME], tool_choice="required", parallel_tool_calls=False))

    assert json.loads(engine.added[-1].params.structured_outputs.json)["maxItems"] == 1


def point(kind: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Point"}},
        "required": ["at"],
        "$defs": {"Point": {"type": kind}},
    }
    return {"type": "function", "function": {"name": f"go_{kind}", "parameters": parameters}}


def test_types_that_functions_define_are_found(make_client, say, engine) -> None:
    say('[{"name": "go_string", "parameters": {"at": "a"}}]')
    ask = make_client()

    ask(chat(tools=[point("string"), TIME], tool_choice="required"))

    validator = jsonschema.Draft202012Validator(json.loads(engine.added[-1].params.structured_outputs.json))
    assert validator.is_valid([{"name": "go_string", "parameters": {"at": "a"}}])
    assert not validator.is_valid([{"name": "go_string", "parameters": {"at": 1}}])
    with pytest.raises(openai.BadRequestError, match=r"'go_integer' defines .*Point otherwise"):
        ask(chat(tools=[point("string"), point("integer")], tool_choice="required"))


def test_a_choice_and_a_format_exclude_each_other(make_client, say) -> None:
    say("{}")
    asked = {"tools": [TIME], "response_format": {"type": "json_object"}}

    with pytest.raises(openai.BadRequestError, match="'response_format' and this 'tool_choice' both say"):
        make_client()(chat(tool_choice="required", **asked))


def test_a_bundle_without_the_graphs_names_the_choice(make_client, engine) -> None:
    engine.sampler = SamplerSpec()
    ask = make_client("{{ tools | length }}")

    with pytest.raises(openai.BadRequestError, match="constraints") as refusal:
        ask(chat(tools=[TIME], tool_choice="required"))

    assert refusal.value.param == "tool_choice"


def test_an_answer_with_a_format_is_not_read_as_reasoning(make_client, say) -> None:
    say('{"a": 1}')

    answer = make_client(reasoning_parser="deepseek_r1")(chat(response_format={"type": "json_object"}))

    assert (answer.choices[0].message.content, answer.choices[0].message.reasoning) == ('{"a": 1}', None)
