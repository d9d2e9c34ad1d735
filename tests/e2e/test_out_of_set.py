"""Requests outside the set of warm steps are refused with the limit; those inside it free what they held."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.harness import MAX_MODEL_LEN, VOCAB_SIZE, Server, eventually, streaming

pytestmark = pytest.mark.slow

NUM_PROMPTS, NUM_TOKENS, MAX_NUM_SEQS = 64, 48, 2
LONG_STEPS = NUM_PROMPTS * (NUM_TOKENS - 1) // MAX_NUM_SEQS


LIMIT = f"max_model_len = {MAX_MODEL_LEN}"
USER = {"role": "user", "content": "hi"}
REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"prompt": [1] * MAX_MODEL_LEN, "max_tokens": 1}, LIMIT, "64 tokens"),
    ({"prompt": [1] * 5000, "max_tokens": 1}, LIMIT, "5000 tokens"),
    ({"prompt": "quick " * 5000}, LIMIT, ""),
    ({"prompt": [1] * 32, "max_tokens": 33}, LIMIT, "65 tokens"),
    ({"prompt": [1], "max_tokens": 10**9}, LIMIT, "1000000001 tokens"),
    ({"prompt": [VOCAB_SIZE]}, f"vocabulary's size {VOCAB_SIZE}", ""),
    ({"prompt": [[1], [2] * MAX_MODEL_LEN]}, LIMIT, ""),
    ({"prompt": ""}, "the prompt is empty", ""),
    ({"prompt": []}, "prompt", ""),
    ({}, "Missing required parameter: 'prompt'", ""),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "a", "temperature": 3}, "temperature", "from 0 to 2"),
    ({"prompt": "a", "top_p": 0}, "top_p", "(0, 1]"),
    ({"prompt": "a", "priority": 2}, "'priority'", "not supported"),
    ({"messages": [{**USER, "content": "fox " * 80}]}, LIMIT, ""),
    ({"messages": [USER], "max_tokens": 64}, f"{MAX_MODEL_LEN} tokens", ""),
    ({"messages": []}, "messages", ""),
    ({"messages": [{**USER, "role": "wizard"}]}, "messages[0].role", ""),
)
"""Bodies, and words of what is said of them."""


def test_a_request_outside_the_limits_is_refused_with_the_limit(server: Server) -> None:
    for body, *words in REFUSED:
        response = server.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)

        assert response.status_code == 400, body
        error = response.json()["error"]
        assert error["type"] in ("Bad Request", "BadRequestError"), body
        assert [word for word in words if word not in error["message"]] == [], body
    assert server.metric("aotgaudi_compilations_total") == 0
    assert server.is_idle()


def test_a_body_that_is_no_json_object_is_refused(server: Server) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b'{"prompt": "a"', b"", b"\xff\xfe", b'["prompt"]', b"null"):
        response = server.client.post("/v1/completions", content=content, headers=headers)

        assert response.status_code == 400, content
        assert "JSON" in response.json()["error"]["message"], content


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
