"""The official client works against a real server, for all that the server offers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.harness import MAX_MODEL_LEN, Server, Workplace

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


def test_n_answers_are_those_of_seeds_in_a_row_whole_and_streamed(
    client: openai.OpenAI, server: Server
) -> None:
    asked = {"model": server.model_name, "prompt": "the quick", "max_tokens": 8, "temperature": 1.5}

    alone = [client.completions.create(**asked, seed=30 + i).choices[0].text for i in range(3)]
    whole = client.completions.create(**asked, seed=30, n=3)
    chunks = list(client.completions.create(**asked, seed=30, n=3, stream=True))

    streamed = [""] * 3
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == streamed == alone
    assert len(set(alone)) == 3
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == client.completions.create(**asked).usage.prompt_tokens


def test_the_text_of_a_stop_string_comes_on_request(client: openai.OpenAI, server: Server) -> None:
    asked = {"model": server.model_name, "prompt": "the quick", "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    stop = plain[4:6]

    cut = client.completions.create(**asked, stop=stop).choices[0]
    kept = client.completions.create(
        **asked, stop=stop, extra_body={"include_stop_str_in_output": True}
    ).choices[0]

    assert kept.text == cut.text + stop
    assert kept.finish_reason == cut.finish_reason == "stop"


def test_a_template_gets_variables_and_leaves_the_last_message_open(
    client: openai.OpenAI, server: Server
) -> None:
    turns = [{"role": "user", "content": "jumps"}, {"role": "assistant", "content": "over the"}]
    asked = {"model": server.model_name, "messages": turns, "max_tokens": 6, "temperature": 0}

    continued = client.chat.completions.create(
        **asked, extra_body={"continue_final_message": True, "echo": True, "chat_template_kwargs": {"x": [1]}}
    )
    by_hand = client.completions.create(
        model=server.model_name,
        prompt="<|user|>jumps<|end|><|assistant|>over the",
        max_tokens=6,
        temperature=0,
    )

    assert continued.choices[0].message.content == "over the" + by_hand.choices[0].text


def test_a_long_prompt_is_cut_to_its_end_on_request(client: openai.OpenAI, server: Server) -> None:
    asked = {"model": server.model_name, "max_tokens": 4, "temperature": 0}

    cut = client.completions.create(
        **asked, prompt=list(range(1, 200)), extra_body={"truncate_prompt_tokens": 5}
    )
    short = client.completions.create(**asked, prompt=list(range(195, 200)))

    assert cut.usage is not None
    assert cut.usage.prompt_tokens == 5
    assert cut.choices[0].text == short.choices[0].text


class Verdict(BaseModel):
    """What a chat is asked for."""

    right: bool
    colour: Literal["red", "green"]


def test_an_answer_is_parsed_into_the_callers_type(client: openai.OpenAI, server: Server) -> None:
    for seed in range(4):
        done = client.chat.completions.parse(
            model=server.model_name,
            messages=[{"role": "user", "content": "the fox"}],
            response_format=Verdict,
            max_tokens=48,
            seed=seed,
            extra_body={"bad_words": [" ", "\n", "\t", "\r"]},
        )

        choice = done.choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Verdict)


def test_a_schema_holds_for_streams_and_for_each_of_several_answers(
    client: openai.OpenAI, server: Server
) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}
    asked = {
        "model": server.model_name,
        "messages": [{"role": "user", "content": "jumps"}],
        "max_tokens": 40,
        "seed": 5,
        "n": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "letters", "schema": schema}},
        "extra_body": {"bad_words": [" ", "\n", "\t", "\r"]},
    }

    whole = client.chat.completions.create(**asked)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert texts == [choice.message.content for choice in whole.choices]
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    for text in texts:
        assert 1 <= len(json.loads(text)) <= 3
        assert set(json.loads(text)) <= {"a", "b"}


@pytest.mark.parametrize(
    ("extra", "is_right"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}.__contains__),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, str.isdigit),
        ({"structured_outputs": {"grammar": 'root ::= "<" ("a" | "b") ">"'}}, {"<a>", "<b>"}.__contains__),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}.__contains__),
        ({"guided_regex": "x+y", "ignore_eos": True}, lambda text: text.strip("x") == "y"),
    ],
)
def test_vllms_names_for_structured_output_work(
    client: openai.OpenAI, server: Server, extra: dict[str, Any], is_right: Callable[[str], bool]
) -> None:
    done = client.completions.create(
        model=server.model_name, prompt="the quick", max_tokens=40, seed=1, temperature=0.8, extra_body=extra
    )

    assert done.choices[0].finish_reason == "stop"
    assert is_right(done.choices[0].text), done.choices[0].text


def test_tokens_are_biased_allowed_and_forbidden(client: openai.OpenAI, server: Server) -> None:
    asked = {"model": server.model_name, "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
    plain = client.completions.create(**asked, logprobs=0, extra_body={"ignore_eos": True})
    word = next(token.strip() for token in plain.choices[0].logprobs.tokens if token.strip().isalpha())

    biased = client.completions.create(**asked, logit_bias={"7": 100}, logprobs=0).choices[0]
    allowed = client.completions.create(
        **asked, logprobs=0, extra_body={"allowed_token_ids": [5, 6]}
    ).choices[0]
    without = client.completions.create(**asked, logprobs=0, extra_body={"bad_words": [word]}).choices[0]
    longer = client.completions.create(**asked, logit_bias={"0": 100}, extra_body={"min_tokens": 5})

    assert len(set(biased.logprobs.tokens)) == 1
    assert len(set(allowed.logprobs.tokens)) <= 2
    assert word not in [token.strip() for token in without.logprobs.tokens]
    assert longer.usage is not None
    assert longer.usage.completion_tokens == 6  # The end comes as soon as it may.


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "at /properties/a: Invalid type"),
        (
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(12)]},
            "too large",
        ),
        ({"anyOf": [{"properties": {"a": {"not": {}}}}]}, "Unimplemented keys"),
    ],
)
def test_a_schema_that_cannot_be_used_is_the_clients_mistake(
    client: openai.OpenAI, server: Server, schema: dict[str, Any], said: str
) -> None:
    began = time.monotonic()

    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.chat.completions.create(
            model=server.model_name,
            messages=[{"role": "user", "content": "a"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )

    assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match=r"too (many|complex)"):
        client.completions.create(
            model=server.model_name, prompt="a", extra_body={"guided_regex": "((a{1000}){1000}){1000}"}
        )
    assert time.monotonic() - began < 30
    assert server.complete("the quick", max_tokens=3)["choices"][0]["text"] is not None


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=f"max_model_len = {MAX_MODEL_LEN}"):
        client.completions.create(model=server.model_name, prompt="a", max_tokens=MAX_MODEL_LEN)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-9", prompt="a")


def test_log_probabilities_come_with_every_token_whole_and_streamed(
    client: openai.OpenAI, server: Server
) -> None:
    asked = {
        "model": server.model_name,
        "messages": [{"role": "user", "content": "the quick"}],
        "max_completion_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"ignore_eos": True},
    }

    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    chunks = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, stream=True)]

    assert len(whole) == 6
    for token in whole:
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob), "greedy takes the likeliest"
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert sum(math.exp(value) for value in values) <= 1 + 1e-6
    streamed = [token for logprobs in chunks if logprobs for token in logprobs.content]
    assert [(token.token, token.logprob) for token in streamed] == [
        (token.token, pytest.approx(token.logprob, abs=1e-4)) for token in whole
    ]


def test_an_echo_has_the_log_probabilities_of_transformers(
    client: openai.OpenAI, server: Server, workplace: Workplace
) -> None:
    """The prompts take several chunks and, repeated, would start after cached blocks."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(workplace.model, dtype=torch.float32)
    prompts = [
        [(i * 37 + 11 * k) % 500 + 4 for i in range(length)] for k, length in enumerate((45, 1, 17, 32))
    ]

    for _ in range(2):
        choices = client.completions.create(
            model=server.model_name, prompt=prompts, max_tokens=1, temperature=0, echo=True, logprobs=2
        ).choices

        for prompt, choice in zip(prompts, choices, strict=True):
            with torch.no_grad():
                scores = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
            expected = scores[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
            found = choice.logprobs.token_logprobs
            assert found[0] is None
            assert found[1:-1] == pytest.approx(expected, abs=1e-4)
            assert found[-1] == pytest.approx(scores[-1].max().item(), abs=1e-4)
            tops = [max(top.values()) for top in choice.logprobs.top_logprobs[1:]]
            assert tops == pytest.approx(scores.max(-1).values.tolist(), abs=1e-4)
    assert server.metric("aotgaudi_compilations_total") == 0


def test_a_prompt_is_scored_without_an_answer(client: openai.OpenAI, server: Server) -> None:
    asked = {"model": server.model_name, "prompt": "the quick brown fox", "temperature": 0}

    alone = client.completions.create(**asked, max_tokens=0, echo=True, logprobs=1)
    scored = client.completions.create(**asked, max_tokens=1, extra_body={"prompt_logprobs": 1})

    choice = alone.choices[0]
    assert choice.text == asked["prompt"]
    assert "".join(choice.logprobs.tokens) == asked["prompt"]
    extra = scored.choices[0].model_extra
    assert extra is not None
    own = [next(iter(place.values()))["logprob"] for place in extra["prompt_logprobs"][1:]]
    assert own == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


def test_a_penalty_keeps_a_token_from_coming_again(client: openai.OpenAI, server: Server) -> None:
    def answer(**penalty: float) -> list[str]:
        done = client.completions.create(
            model=server.model_name,
            prompt=[1, 2, 3],
            max_tokens=24,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True, **penalty},
        )
        return done.choices[0].logprobs.tokens

    plain, penalised = answer(), answer(repetition_penalty=50.0, presence_penalty=2.0, frequency_penalty=2.0)

    assert len(set(penalised)) > len(set(plain))
