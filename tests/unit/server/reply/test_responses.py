"""``/v1/responses``: the official client and its types are the judges."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.unit.server.reply.conftest import WEATHER

HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", **WEATHER["function"], "strict": True}
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def respond(**asked: Any) -> Callable[[openai.AsyncOpenAI], Any]:
    async def question(client: openai.AsyncOpenAI) -> Response:
        answer = await client.responses.with_raw_response.create(model="tiny", **{"input": "Hi", **asked})
        return Response.model_validate(json.loads(answer.content))  # The client itself lets anything pass.

    return question


def streamed(**asked: Any) -> Callable[[openai.AsyncOpenAI], Any]:
    async def question(client: openai.AsyncOpenAI) -> list[Any]:
        events = await client.responses.create(model="tiny", stream=True, **{"input": "Hi", **asked})
        return [EVENTS.validate_python(event.model_dump(exclude_unset=True)) async for event in events]

    return question


def gathered(**asked: Any) -> Callable[[openai.AsyncOpenAI], Any]:
    """What the client itself makes of a stream."""

    async def question(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(model="tiny", **{"input": "Hi", **asked}) as stream:
            return await stream.get_final_response()

    return question


def test_a_text_is_answered(make_client, say, prompt) -> None:
    say("Hello there.")

    answer = make_client()(
        respond(
            instructions="Be kind.",
            max_output_tokens=9,
            temperature=0.5,
            top_p=0.25,
            metadata={"a": "b"},
            extra_body={"top_k": 5},
        )
    )

    assert answer.output_text == "Hello there."
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be kind.", {"a": "b"}, 9)
    assert (answer.temperature, answer.top_p, answer.tool_choice, answer.tools) == (0.5, 0.25, "auto", [])
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens == 5
    assert answer.id.startswith("resp-")
    assert prompt() == "<system>Be kind.<user>Hi<assistant>"


REQUIRED = {
    *(
        "id",
        "object",
        "created_at",
        "completed_at",
        "status",
        "incomplete_details",
        "model",
        "previous_response_id",
    ),
    *(
        "instructions",
        "output",
        "error",
        "tools",
        "tool_choice",
        "truncation",
        "parallel_tool_calls",
        "text",
        "top_p",
    ),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *(
        "max_output_tokens",
        "max_tool_calls",
        "store",
        "background",
        "service_tier",
        "metadata",
        "safety_identifier",
    ),
    "prompt_cache_key",
}
"""What the specification of Open Responses (2026-04-24) requires of a response."""


def test_a_response_has_every_required_member(make_client, say) -> None:
    say("Hello there.")

    answer = make_client()(respond())

    members = answer.model_dump()
    assert members.keys() >= REQUIRED
    assert answer.completed_at >= answer.created_at
    assert (members["presence_penalty"], members["top_logprobs"], members["background"]) == (0.0, 0, False)


def test_values_reach_the_engine(make_client, say, engine) -> None:
    say("a")

    make_client()(
        respond(max_output_tokens=9, temperature=0.5, extra_body={"top_k": 5, "seed": 3, "stop": "x"})
    )

    params = engine.added[-1].params
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (9, 0.5, 5, 3)
    assert params.stop == ("x",)


TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def kinds(events: list[Any]) -> list[str]:
    """Types of events; several deltas in a row count as one."""
    types = [event.type for event in events]
    return [each for each, before in zip(types, [None, *types], strict=False) if each != before]


def test_a_stream_has_the_official_events_in_order(make_client, say) -> None:
    say("Hello there.")

    events = make_client()(streamed())

    assert kinds(events) == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith("delta")) == "Hello there."
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[2].item.id}
    assert events[0].response.output == []
    assert events[-1].response.output_text == "Hello there."
    assert events[-1].response.usage.output_tokens == 5


@pytest.mark.parametrize("ask_with", [respond, gathered])
def test_thought_words_and_calls_are_items_in_order(make_client, say, ask_with) -> None:
    say(f"<think>Where is Oslo?</think>Let me see. {CALL}{CALL}")

    answer = make_client(reasoning_parser="qwen3", **HERMES)(ask_with(tools=[TOOL]))

    thought, message, call, other = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Where is Oslo?")
    assert message.content[0].text == "Let me see."
    for each in (call, other):
        assert (each.type, each.name, each.status) == ("function_call", "get_weather", "completed")
        assert each.arguments == '{"city": "Oslo"}'
    assert len({call.id, call.call_id, other.id, other.call_id}) == 4
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert answer.tools[0].name == "get_weather"


def test_a_stream_of_items_begins_the_next_when_the_last_has_ended(make_client, say) -> None:
    say(f"<think>Hm.</think>Well.{CALL}")

    events = make_client(reasoning_parser="qwen3", **HERMES)(streamed(tools=[TOOL]))

    assert kinds(events)[2:] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *TEXT_EVENTS[2:-1],
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == [0, 1, 2]
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("is_dumped", [True, False])
def test_the_round_trip_sends_items_back(make_client, say, prompt, is_dumped: bool) -> None:
    ask = make_client(reasoning_parser="qwen3", **HERMES)
    say(f"<think>Hm.</think>Well.{CALL}")
    first = ask(respond(tools=[TOOL]))

    say("It rains.")
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [item.model_dump() if is_dumped else item for item in first.output]
    answer = ask(respond(input=[{"role": "user", "content": "Hi"}, *items, result], tools=[TOOL]))

    assert answer.output_text == "It rains."
    expected = f'<assistant><think>Hm.</think>Well.<call>get_weather {{"city": "Oslo"}} {call.call_id}</call>'
    assert f"<user>Hi{expected}<tool>rain<for {call.call_id}><assistant>" in prompt()


def test_parts_of_content_are_text(make_client, say, prompt) -> None:
    say("a")
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "y", "annotations": []}]}

    make_client()(respond(input=[user, said, {"role": "developer", "content": "z"}]))

    assert prompt() == "<user>x<assistant>y<system>z<assistant>"


def test_an_answer_that_is_cut_off_is_incomplete(make_client, say) -> None:
    say("Hel", reason="length")
    ask = make_client()

    answer, events = ask(respond(max_output_tokens=2)), ask(streamed(max_output_tokens=2))

    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.completed_at is None
    assert events[-1].type == "response.incomplete"


def test_an_answer_without_text_has_an_empty_message(make_client, say) -> None:
    say("")

    answer = make_client()(respond())

    assert (answer.output_text, len(answer.output)) == ("", 1)


def test_a_stream_that_fails_says_so(make_client, engine, scripts) -> None:
    engine.script, engine._check = scripts["broken"], lambda *_: None

    events = make_client()(streamed())

    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert "secret" not in events[-1].model_dump_json()


def test_a_certain_function_and_a_format_are_constraints(make_client, say, engine) -> None:
    say('{"city": "Oslo"}')
    ask = make_client()
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}

    called = ask(respond(tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}))
    constraint = engine.added[-1].params.structured_outputs.json
    formatted = ask(respond(text={"format": {"type": "json_schema", "name": "city", "schema": schema}}))

    assert called.output[0].arguments == '{"city": "Oslo"}'
    assert called.tool_choice.name == "get_weather"
    assert json.loads(constraint) == TOOL["parameters"]
    assert formatted.output_text == '{"city": "Oslo"}'
    assert formatted.text.format.schema_ == schema
    assert json.loads(engine.added[-1].params.structured_outputs.json) == schema


@pytest.mark.parametrize(
    ("asked", "param", "problem"),
    [
        (
            {"previous_response_id": "resp-1"},
            "previous_response_id",
            "keeps no responses; send the conversation",
        ),
        ({"store": True}, "store", "keeps no responses"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"background": True}, "background", "not supported by this server yet"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input[0].type",
            "An item of type 'item_reference'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "A content part of type 'input_image' is not supported",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            "A tool of type 'web_search' is not supported",
        ),
        ({"tools": [TOOL]}, "tool_choice", "--enable-auto-tool-choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "names the function 'g'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "max_model_len"),
        ({"temperature": 7}, "temperature", "a number from 0 to 2"),
        ({"input": "x" * 50_000}, "input", "max_model_len"),
        ({"input": []}, "input", "at least 1 item"),
    ],
)
def test_what_cannot_be_done_is_said(make_client, engine, asked, param, problem) -> None:
    with pytest.raises(openai.BadRequestError, match=problem) as refusal:
        make_client()(respond(**asked))

    assert refusal.value.param == param
