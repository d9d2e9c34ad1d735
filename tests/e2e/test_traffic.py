"""Under any admissible traffic nothing is compiled, nothing leaks, and answers do not depend on company."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.harness import MAX_MODEL_LEN, VOCAB_SIZE, Server, Workplace, eventually
from tests.e2e.traffic import PROBES, Order, Outcome, outcome_of, send_all

pytestmark = pytest.mark.slow

NUM_REQUESTS = 500
NUM_CONNECTIONS = 12
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "jar", "of", "Zürich", "狐")


def make_orders(random: Random) -> list[Order]:
    return [make_order(random) for _ in range(NUM_REQUESTS)]


def make_order(random: Random) -> Order:
    stream = random.random() < 0.5
    if random.random() < 0.2:
        probe = random.randrange(len(PROBES))
        return Order("/v1/completions", {**PROBES[probe], "stream": stream}, probe=probe)
    leave_after = 0 if stream and random.random() < 0.2 else None
    max_tokens = random.randint(1 if leave_after is None else 8, 24)
    body = {"max_tokens": max_tokens, "stream": stream, **make_sampling(random)}
    if random.random() < 0.3:
        content = " ".join(random.choices(WORDS, k=random.randint(1, 3)))
        messages = [{"role": random.choice(["user", "system"]), "content": content}]
        return Order("/v1/chat/completions", {**body, "messages": messages}, leave_after=leave_after)
    prompts = [make_prompt(random, MAX_MODEL_LEN - max_tokens) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    prompt = prompts[0] if len(prompts) == 1 else prompts
    return Order("/v1/completions", {**body, "prompt": prompt}, leave_after=leave_after)


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


def test_500_mixed_requests_compile_nothing_and_probes_among_them_are_answered_as_alone(
    server: Server,
) -> None:
    alone = [outcome_of(200, [server.complete(**probe)]) for probe in PROBES]
    counts = ("aotgaudi_compilations_total", "aotgaudi_failed_steps_total")
    orders = make_orders(Random(500))

    outcomes: list[tuple[Order, Outcome | None]] = []
    asyncio.run(send_all(server.base_url, orders, NUM_CONNECTIONS, lambda *outcome: outcomes.append(outcome)))

    answered = [(order, outcome) for order, outcome in outcomes if outcome]
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

    assert text(2**63 - 1) == text(VOCAB_SIZE) == text(0)


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
