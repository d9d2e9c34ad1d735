"""Requests outside the set of warm steps are refused with the limit; those inside it free what they held."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.harness import MAX_MODEL_LEN, VOCAB_SIZE, Server, eventually, streaming

pytestmark = pytest.mark.slow

NUM_PROMPTS, NUM_TOKENS, MAX_NUM_SEQS = 64, 48, 2
LONG_STEPS = NUM_PROMPTS * (NUM_TOKENS - 1) // MAX_NUM_SEQS


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [1] * MAX_MODEL_LEN, "max_tokens": 1}, (f"max_model_len = {MAX_MODEL_LEN}", "64 tokens")),
        ({"prompt": [1] * 5000, "max_tokens": 1}, (f"max_model_len = {MAX_MODEL_LEN}", "5000 tokens")),
        ({"prompt": "quick " * 5000}, (f"max_model_len = {MAX_MODEL_LEN}",)),
        ({"prompt": [1] * 32, "max_tokens": 33}, (f"max_model_len = {MAX_MODEL_LEN}", "65 tokens")),
        ({"prompt": [1], "max_tokens": 10**9}, (f"max_model_len = {MAX_MODEL_LEN}", "1000000001 tokens")),
        ({"prompt": [VOCAB_SIZE]}, (f"vocabulary's size {VOCAB_SIZE}",)),
        ({"prompt": [[1], [2] * MAX_MODEL_LEN]}, (f"max_model_len = {MAX_MODEL_LEN}",)),
        ({"prompt": ""}, ("the prompt is empty",)),
        ({"prompt": []}, ("prompt",)),
        ({}, ("Missing required parameter: 'prompt'",)),
        ({"prompt": "a", "max_tokens": 0}, ("max_tokens", "greater than or equal to 1")),
        ({"prompt": "a", "temperature": 3}, ("temperature", "from 0 to 2")),
        ({"prompt": "a", "top_p": 0}, ("top_p", "(0, 1]")),
        ({"prompt": "a", "priority": 2}, ("'priority'", "not supported")),
    ],
)
def test_a_completion_outside_the_limits_is_refused_with_the_limit(
    server: Server, body: dict[str, Any], words: tuple[str, ...]
) -> None:
    response = server.post("/v1/completions", body)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] in ("Bad Request", "BadRequestError")
    for word in words:
        assert word in error["message"]
    assert server.metric("aotgaudi_compilations_total") == 0
    assert server.is_idle()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": "fox " * 80}]}, (f"max_model_len = {MAX_MODEL_LEN}",)),
        ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}, (f"{MAX_MODEL_LEN} tokens",)),
        ({"messages": []}, ("messages",)),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, ("messages[0].role",)),
    ],
)
def test_a_chat_outside_the_limits_is_refused_with_the_limit(
    server: Server, body: dict[str, Any], words: tuple[str, ...]
) -> None:
    response = server.post("/v1/chat/completions", body)

    assert response.status_code == 400
    for word in words:
        assert word in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b'{"prompt": "a"', b"", b"\xff\xfe", b'["prompt"]', b"null"])
def test_a_body_that_is_no_json_object_is_refused(server: Server, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}

    response = server.client.post("/v1/completions", content=content, headers=headers)

    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_the_longest_request_that_fits_is_served(server: Server) -> None:
    longest_prompt = server.complete([7] * (MAX_MODEL_LEN - 1), max_tokens=1)
    longest_output = server.complete([7], max_tokens=MAX_MODEL_LEN - 1, ignore_eos=True)

    assert longest_prompt["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert longest_output["usage"]["completion_tokens"] == MAX_MODEL_LEN - 1


def num_decode_steps(server: Server) -> float:
    return server.metric("aotgaudi_step_seconds_count", kind="decode")


def long_body() -> dict[str, Any]:
    """Takes at least `LONG_STEPS` decode steps, if it is let."""
    prompts = [[number + 1] * 10 for number in range(NUM_PROMPTS)]
    return {"prompt": prompts, "max_tokens": NUM_TOKENS, "ignore_eos": True}


def test_a_client_that_leaves_a_stream_frees_its_blocks(server: Server) -> None:
    server.complete([1], max_tokens=2, ignore_eos=True)
    before = num_decode_steps(server)

    with streaming(server, long_body()) as events:
        next(events)
        assert not server.is_idle()

    assert eventually(server.is_idle)
    assert num_decode_steps(server) - before < LONG_STEPS


def test_a_client_that_does_not_wait_for_its_answer_frees_its_blocks(server: Server) -> None:
    server.complete([1], max_tokens=2, ignore_eos=True)
    before = num_decode_steps(server)

    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=long_body(), timeout=0.1)

    assert eventually(server.is_idle)
    assert num_decode_steps(server) - before < LONG_STEPS
