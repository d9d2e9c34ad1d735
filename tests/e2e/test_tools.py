"""Tools and reasoning through the real processes. The model has random weights: it calls nothing by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import tokenizers

from tests.e2e.harness import Server, Workplace

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for tool in tools or [] %}~{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("jump", "mix")]
ASKED = [{"role": "user", "content": "fox?"}]


@pytest.fixture(scope="module")
def server(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    options = (
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--reasoning-parser",
        "deepseek_r1",
    )
    with workplace.serve(*options, "--chat-template", template) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_the_template_writes_tools_and_the_answer_is_read(client: openai.OpenAI, server: Server) -> None:
    asked = {"model": server.model_name, "messages": ASKED, "max_completion_tokens": 8, "temperature": 0}

    plain = client.chat.completions.create(**asked)
    whole = client.chat.completions.create(**asked, tools=TOOLS)
    chunks = list(client.chat.completions.create(**asked, tools=TOOLS, stream=True))

    assert whole.usage.prompt_tokens > plain.usage.prompt_tokens
    message = whole.choices[0].message
    assert message.content is None, "the model never ends its thought"
    assert message.reasoning
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning


def test_results_of_calls_are_sent(client: openai.OpenAI, server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "jump", "arguments": json.dumps({})}}
    history = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "over"},
    ]

    answer = client.chat.completions.create(
        model=server.model_name, messages=history, tools=TOOLS, max_completion_tokens=4
    )

    assert answer.usage.completion_tokens <= 4


def test_nothing_was_compiled(client: openai.OpenAI, server: Server) -> None:
    del client

    assert server.metric("aotgaudi_compilations_total") == 0
    assert server.is_idle()


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FLY = {"type": "function", "function": {"name": "fly", "parameters": CITY}}


@pytest.fixture
def no_space(workplace: Workplace) -> dict[str, int]:
    """A bias against tokens of white space, of which JSON may have any amount, and random weights like it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(workplace.model / "tokenizer.json"))
    return {str(i): -100 for i in tokenizer.get_vocab().values() if tokenizer.decode([i]).isspace()}


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_must_call_calls(
    client: openai.OpenAI, server: Server, no_space: dict[str, int], seed: int
) -> None:
    asked = {"model": server.model_name, "messages": ASKED, "tools": [FLY], "seed": seed}
    asked |= {"temperature": 1.0, "logit_bias": no_space}
    named = {"type": "function", "function": {"name": "fly"}}

    some = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[
        0
    ]
    one = client.chat.completions.create(**asked, tool_choice=named).choices[0]
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        streamed = stream.get_final_completion().choices[0]

    for choice, reason in ((some, "tool_calls"), (one, "stop"), (streamed, "stop")):
        (call,) = choice.message.tool_calls
        assert call.function.name == "fly"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        assert choice.finish_reason == reason
    assert streamed.message.tool_calls[0].function.arguments == one.message.tool_calls[0].function.arguments
