"""Under any admissible traffic nothing is compiled, nothing leaks, and answers do not depend on company."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.e2e.harness import MAX_MODEL_LEN, VOCAB_SIZE, Server, Workplace, events_of, eventually

pytestmark = pytest.mark.slow

NUM_REQUESTS = 500
NUM_CONNECTIONS = 12
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "jar", "of", "Zürich", "狐")

PROBES: tuple[Mapping[str, Any], ...] = (
    {"prompt": "the quick brown fox", "max_tokens": 24, "temperature": 0},
    {"prompt": [9] * 33, "max_tokens": 20, "temperature": 1, "seed": 7},
    {"prompt": "seven wizards", "max_tokens": 30, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 1},
    {"prompt": list(range(1, 17)), "max_tokens": 40, "temperature": 1.3, "seed": -5, "ignore_eos": True},
    {"prompt": "a jar", "max_tokens": 24, "temperature": 0.9, "top_k": 50, "seed": 3, "stop": ["44", "q"]},
)
"""Repeatable requests, asked again and again among the others."""


@dataclass(frozen=True)
class Order:
    """One request of the traffic. `probe` is its number among `PROBES`; `is_cancelled`: left after one event."""

    path: str
    body: Mapping[str, Any]
    probe: int | None = None
    is_cancelled: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of an order: status, the text of each choice, and the finish reasons."""

    status: int
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]


def make_orders(random: Random) -> list[Order]:
    return [make_order(random) for _ in range(NUM_REQUESTS)]


def make_order(random: Random) -> Order:
    stream = random.random() < 0.5
    if random.random() < 0.2:
        probe = random.randrange(len(PROBES))
        return Order("/v1/completions", {**PROBES[probe], "stream": stream}, probe)
    is_cancelled = stream and random.random() < 0.2
    max_tokens = random.randint(8 if is_cancelled else 1, 24)
    body = {"max_tokens": max_tokens, "stream": stream, **make_sampling(random)}
    if random.random() < 0.3:
        content = " ".join(random.choices(WORDS, k=random.randint(1, 3)))
        messages = [{"role": random.choice(["user", "system"]), "content": content}]
        return Order("/v1/chat/completions", {**body, "messages": messages}, None, is_cancelled)
    prompts = [make_prompt(random, MAX_MODEL_LEN - max_tokens) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    prompt = prompts[0] if len(prompts) == 1 else prompts
    return Order("/v1/completions", {**body, "prompt": prompt}, None, is_cancelled)


def make_prompt(random: Random, longest: int) -> list[int]:
    return [random.randrange(1, VOCAB_SIZE) for _ in range(random.randint(1, longest))]


def make_sampling(random: Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {"temperature": random.choice([0, 0.3, 0.7, 1, 2])}
    for name, values in {
        "top_p": [0.1, 0.8, 0.95, 1],
        "top_k": [-1, 0, 1, 20, 600],
        "seed": [0, -(2**63), 2**63 - 1],
        "stop": ["1", [" the", "\n", "2"], []],
        "stop_token_ids": [[5, 6], []],
        "ignore_eos": [True, False],
    }.items():
        if random.random() < 0.4:
            chosen[name] = random.choice(values)
    return chosen


async def send_all(base_url: str, orders: Sequence[Order]) -> list[Outcome | None]:
    """Sends all orders, `NUM_CONNECTIONS` at a time; None for one that was left."""
    gate = asyncio.Semaphore(NUM_CONNECTIONS)
    async with httpx.AsyncClient(base_url=base_url, timeout=120) as client:

        async def one(order: Order) -> Outcome | None:
            async with gate:
                return await send(client, order)

        return list(await asyncio.gather(*map(one, orders)))


async def send(client: httpx.AsyncClient, order: Order) -> Outcome | None:
    async with client.stream("POST", order.path, json=dict(order.body)) as response:
        if not order.body["stream"]:
            data = json.loads(await response.aread())
            return outcome_of(response.status_code, data.get("choices", [data]))
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            if order.is_cancelled:
                assert response.status_code == 200
                return None
        choices = [choice for event in events_of(iter(lines)) for choice in event["choices"]]
        return outcome_of(response.status_code, choices)


def outcome_of(status: int, choices: Sequence[Mapping[str, Any]]) -> Outcome:
    """Puts the pieces of each choice together, whether whole or in chunks, of a completion or a chat."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in choices:
        index = choice["index"]
        message = choice.get("message") or choice.get("delta") or {}
        texts[index] = texts.get(index, "") + (choice.get("text") or message.get("content") or "")
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    return Outcome(status, tuple(texts[i] for i in sorted(texts)), tuple(reasons[i] for i in sorted(texts)))


def test_500_mixed_requests_compile_nothing_and_probes_among_them_are_answered_as_alone(
    server: Server,
) -> None:
    alone = [outcome_of(200, server.complete(**probe)["choices"]) for probe in PROBES]
    counts = ("aotgaudi_compilations_total", "aotgaudi_not_warmed_total", "aotgaudi_failed_steps_total")
    orders = make_orders(Random(500))

    outcomes = asyncio.run(send_all(server.base_url, orders))

    answered = [(order, outcome) for order, outcome in zip(orders, outcomes, strict=True) if outcome]
    assert Counter(outcome.status for _, outcome in answered) == {200: len(answered)}
    assert {reason for _, outcome in answered for reason in outcome.finish_reasons} == {"stop", "length"}
    assert len(answered) < NUM_REQUESTS  # Some were left.
    assert {name: server.metric(name) for name in counts} == dict.fromkeys(counts, 0.0)
    assert eventually(server.is_idle)
    probes = [(order.probe, outcome) for order, outcome in answered if order.probe is not None]
    assert {number for number, _ in probes} == set(range(len(PROBES)))
    for number, outcome in probes:
        assert outcome == alone[number]
    for kind in ("prompt", "decode", "defrag"):
        assert server.metric("aotgaudi_step_seconds_count", kind=kind) > 0
    assert server.metric("aotgaudi_preemptions_total") > 0
    assert server.metric("aotgaudi_entries_warm") == server.metric("aotgaudi_entries")


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-45},
        {"temperature": 1e-40, "top_k": 3},
        {"temperature": 1, "top_p": 1e-300},
        {"temperature": 1, "top_k": 1},
    ],
)
def test_sampling_that_leaves_one_token_is_greedy(server: Server, extreme: dict[str, Any]) -> None:
    greedy = server.complete("a lazy dog", max_tokens=12, ignore_eos=True)

    answer = server.complete("a lazy dog", max_tokens=12, ignore_eos=True, **extreme)

    assert answer["choices"] == greedy["choices"]


def test_a_top_k_beyond_any_vocabulary_filters_nothing(server: Server) -> None:
    def text(top_k: int) -> str:
        return str(server.complete("fox", temperature=1, seed=5, top_k=top_k)["choices"][0]["text"])

    assert text(2**63) == text(VOCAB_SIZE) == text(0)


def test_unseeded_sampling_varies_and_seeded_sampling_does_not(server: Server) -> None:
    def texts(**parameters: Any) -> set[str]:
        answers = (server.complete("the fox", max_tokens=12, temperature=1, **parameters) for _ in range(4))
        return {answer["choices"][0]["text"] for answer in answers}

    assert len(texts()) > 1
    assert len(texts(seed=42)) == 1


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 32, 40, 49])
def test_greedy_answers_are_the_ones_of_the_model_itself(
    workplace: Workplace, server: Server, num_prompt_tokens: int
) -> None:
    prompt = [Random(seed).randrange(1, 256) for seed in range(num_prompt_tokens)]
    num_tokens = 15

    answer = server.complete(prompt, max_tokens=num_tokens, ignore_eos=True)

    assert answer["choices"][0]["text"] == reference_text(workplace.model, prompt, num_tokens)


def reference_text(model_dir: Path, prompt: Sequence[int], num_tokens: int) -> str:
    """What transformers makes of the prompt, greedily, a whole forward pass a token."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    text = Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(ids[len(prompt) :])
    return str(text)
