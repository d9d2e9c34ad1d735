"""Cached prefixes, from the client's side: the same answers, fewer tokens computed."""

from __future__ import annotations

from random import Random

import pytest

from aotgaudi import LLM, SamplingParams
from tests.e2e.harness import MAX_MODEL_LEN, Server, Workplace, eventually

pytestmark = pytest.mark.slow


def conversations(seed: int) -> list[list[int]]:
    """Prompts of 1 to 59 tokens, each of which begins as one of three others begin."""
    random = Random(seed)
    histories = [[random.randrange(3, 90) for _ in range(MAX_MODEL_LEN)] for _ in range(3)]
    cuts = ((random.choice(histories), random.randrange(0, MAX_MODEL_LEN - 8)) for _ in range(24))
    return [
        [*history[:cut], *random.choices(range(3, 90), k=random.randrange(1, 4))] for history, cut in cuts
    ]


def test_texts_are_the_same_with_and_without_it(workplace: Workplace) -> None:
    """In float32. Two run at a time in 6 blocks, with chunks, preemption and defragmentation."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=5, ignore_eos=True)
        for seed in range(12)
        for temperature in (0.0, 0.7)
    ]
    with LLM(workplace.bundle, workplace.model, threads=1, enable_prefix_caching=False) as plain:
        expected = [plain.generate(conversations(seed), params) for seed in range(3)]

    with LLM(workplace.bundle, workplace.model, threads=1) as caching:
        found = [caching.generate(conversations(seed), params) for seed in range(3)]
        again = caching.generate(conversations(2), params)
        assert eventually(lambda: caching._model.engine.stats().num_blocks_free == 6)
        stats = caching._model.engine.stats()

    assert found == expected
    assert again == expected[2]
    assert stats.num_prefix_hits > 0
    assert stats.num_blocks_evicted > 0


def test_usage_and_metrics_say_what_was_found(server: Server) -> None:
    prompt = [*range(40, 73), 5]
    names = ("aotgaudi_prefix_cache_queries_total", "aotgaudi_prefix_cache_hits_total")
    before = [server.metric(name) for name in names]

    answers = [server.complete(prompt, max_tokens=2, cache_salt="mine") for _ in range(2)]
    others = server.complete(prompt, max_tokens=2, cache_salt="other")

    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (*answers, others)]
    assert cached == [0, 32, 0]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [server.metric(name) - num for name, num in zip(names, before, strict=True)] == [3 * 34, 32]


def test_an_empty_salt_is_refused(server: Server) -> None:
    refused = server.post("/v1/completions", {"prompt": "the", "cache_salt": ""})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"
