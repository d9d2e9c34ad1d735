"""Requests for long: everything served and a dozen kinds of refusals at random, with an API key; and short ones alone.

Nothing compiles, leaks or differs. ``--requests 100000`` is the whole soak: the short ones take some fifteen minutes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from tests.e2e.harness import MAX_MODEL_LEN, VOCAB_SIZE, Server, Workplace, eventually
from tests.e2e.traffic import PROBES, Order, Outcome, Take, outcome_of, send_all
from tests.hostile.attackers import CHAT, COMPLETIONS
from tests.hostile.conftest import Record
from tests.hostile.mix import TEMPLATE, Mix
from tests.hostile.server import MUST_BE_ZERO
from tests.hostile.witnesses import tree_bytes

NUM_CONNECTIONS = 24
MAX_DRIFT_BYTES = 16 * 10**6
MAX_SHORT_DRIFT_BYTES = 4 * 10**6
BORDERS = sorted(
    {16 * blocks + more for blocks in range(4) for more in (-1, 0, 1)} - {-1, 0} | {MAX_MODEL_LEN - 1}
)
TEXTS = ("the quick brown fox", "", "Zürich 狐", "a" * 40, "\ufffd\ud7ff", "<|end|>", "\r\n\0")
REFUSALS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 0},
    {"max_tokens": MAX_MODEL_LEN + 1},
    {"temperature": -1},
    {"top_p": 0},
    {"prompt": [VOCAB_SIZE]},
    {"stop": [""]},
    {"logprobs": 6},
    {"n": 129},
    {"best_of": 2},
    {"guided_json": {"type": "strin"}},
    {"guided_regex": "("},
    {"logit_bias": {"a": 1}},
)
API_KEY = "soak"
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1e-6, 0.3, 0.7, 1, 2),
    "top_p": (1e-9, 0.1, 0.8, 0.95, 1),
    "top_k": (-1, 0, 1, 20, 10**6),
    "min_p": (0, 0.05, 1),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0, 2),
    "repetition_penalty": (0.01, 1, 2),
    "seed": (0, -(2**63), 2**63 - 1),
    "stop": ("1", [" the", "\n", "2"], ["\ufffd"], ["x" * 256], []),
    "stop_token_ids": ([5, 6], []),
    "ignore_eos": (True, False),
}


def orders(mix: Mix, number: int) -> Iterator[Order]:
    """The mix of all: a third is repeatable, a third asks for one thing beyond sampling."""
    random = mix.random
    for _ in range(number):
        kind = random.random()
        if kind < 0.3:
            probe = random.randrange(len(PROBES))
            yield Order(COMPLETIONS, {**PROBES[probe], "stream": random.random() < 0.5}, probe=probe)
        elif kind < 0.36:
            body = {"prompt": "a", "max_tokens": 1, **random.choice(REFUSALS)}
            has_key = random.random() < 0.9
            yield Order(COMPLETIONS, body, status=400 if has_key else 401, has_key=has_key)
        elif kind < 0.7:
            yield mix.order()
        else:
            yield one(random)


def one(random: Random) -> Order:
    """One request that is admitted; some are streams that their clients leave."""
    stream = random.random() < 0.5
    leave_after = random.randint(0, 10) if stream and random.random() < 0.2 else None
    chosen = {name: random.choice(values) for name, values in SAMPLING.items() if random.random() < 0.4}
    body = {**chosen, "stream": stream}
    if random.random() < 0.2:
        content = random.choice(TEXTS)
        body |= {"messages": [{"role": "user", "content": content}], "max_tokens": random.randint(1, 16)}
        return Order(CHAT, body, leave_after=leave_after)
    if random.random() < 0.2:
        body["logprobs"] = random.choice((0, 1, 5))
    if random.random() < 0.2:
        return Order(
            COMPLETIONS, {**body, "prompt": random.choice(TEXTS[:5]) or "a"}, leave_after=leave_after
        )
    prompts = [prompt(random) for _ in range(random.choice((1, 1, 1, 1, 2, 3, 16)))]
    longest = MAX_MODEL_LEN - max(map(len, prompts))
    body["max_tokens"] = random.choice((1, longest, random.randint(1, longest)))
    return Order(COMPLETIONS, {**body, "prompt": prompts}, leave_after=leave_after)


def prompt(random: Random) -> list[int]:
    """Token ids, as many as a border of blocks has, or any number."""
    length = random.choice(BORDERS) if random.random() < 0.7 else random.randint(1, MAX_MODEL_LEN - 1)
    return [random.randrange(1, VOCAB_SIZE) for _ in range(length)]


class Scale(threading.Thread):
    """Weighs the server four times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._server, self.weights = psutil.Process(pid), list[int]()
        self.is_done = threading.Event()

    def run(self) -> None:
        while not self.is_done.wait(0.25):
            self.weights.append(tree_bytes(self._server))

    def course(self) -> str:
        """How heavy the server was in each tenth of the time, in MB."""
        tenth = max(1, len(self.weights) // 10)
        tenths = [self.weights[at : at + tenth] for at in range(0, len(self.weights), tenth)]
        return " ".join(f"{median(weights) / 1e6:.0f}" for weights in tenths[:10])

    def drift_bytes(self, *, after_tenths: int) -> float:
        """How much heavier the server is in the last tenth of the time than in the one after so many tenths."""
        tenth = max(1, len(self.weights) // 10)
        begin = after_tenths * tenth
        return median(self.weights[-tenth:]) - median(self.weights[begin : begin + tenth] or self.weights)


def send_weighed(server: Server, traffic: Iterator[Order], take: Take) -> tuple[Scale, float]:
    """Sends all orders, with the server on a scale. Returns the scale, and how many seconds it took."""
    scale, begun = Scale(server.process.pid), time.monotonic()
    scale.start()
    asyncio.run(send_all(server.base_url, traffic, NUM_CONNECTIONS, take, API_KEY))
    seconds = time.monotonic() - begun
    scale.is_done.set()
    return scale, seconds


def test_the_soak_compiles_nothing_leaks_nothing_and_answers_as_alone(
    workplace: Workplace, pytestconfig: pytest.Config, record: Record, tmp_path: Path
) -> None:
    number, seed = pytestconfig.getoption("--requests"), pytestconfig.getoption("--soak-seed")
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    mix = Mix(Random(seed), Tokenizer.from_file(str(workplace.model / "tokenizer.json")))
    template = tmp_path / "tools.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    tools = "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", template

    with workplace.serve(*tools, "--api-key", API_KEY) as server:
        server.client.headers["Authorization"] = f"Bearer {API_KEY}"
        num_free = server.metric("aotgaudi_kv_blocks_free")
        alone = [outcome_of(200, [server.complete(**probe)]) for probe in PROBES]

        def take(order: Order, outcome: Outcome | None) -> None:
            if outcome is None:
                counts["left"] += 1
                return
            counts[f"status {outcome.status}"] += 1
            counts["probes"] += order.probe is not None
            counts["checked"] += order.is_right is not None
            if not order.is_met_by(outcome) or (order.probe is not None and outcome != alone[order.probe]):
                wrong.append(f"{order} gave {outcome}")

        scale, seconds = send_weighed(server, orders(mix, number), take)
        drift_bytes = scale.drift_bytes(after_tenths=2)
        record(
            f"soak: {number} requests in {seconds:.0f} s (seed {seed}), {dict(counts)}, {len(wrong)} wrong, "
            f"{scale.weights[-1] / 1e6:.0f} MB at the end, {drift_bytes / 1e6:+.1f} MB since the first fifth "
            f"({scale.course()}), "
            f"{server.metric('aotgaudi_preemptions_total'):g} preemptions, "
            f"{server.metric('aotgaudi_defrag_swaps_total'):g} blocks swapped"
        )

        assert not wrong, "\n".join(wrong[:5])
        assert {name: server.metric(name) for name in MUST_BE_ZERO} == dict.fromkeys(MUST_BE_ZERO, 0.0)
        assert eventually(server.is_idle)
        assert server.metric("aotgaudi_kv_blocks_free") == num_free
        assert drift_bytes <= MAX_DRIFT_BYTES
        assert "Traceback" not in server.log


def short_orders(random: Random, number: int) -> Iterator[Order]:
    """Short completions: greedy and sampled, whole and streamed."""
    for _ in range(number):
        body = {
            "prompt": [random.randrange(1, VOCAB_SIZE) for _ in range(random.randint(1, 16))],
            "max_tokens": random.randint(1, 4),
            "stream": random.random() < 0.2,
            **random.choice(({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3})),
        }
        yield Order(COMPLETIONS, {**body, "ignore_eos": True})


def test_short_requests_compile_nothing_leave_no_block_and_no_memory_behind(
    workplace: Workplace, pytestconfig: pytest.Config, record: Record
) -> None:
    number, seed = pytestconfig.getoption("--requests"), pytestconfig.getoption("--soak-seed")
    statuses: Counter[int] = Counter()

    def take(_: Order, outcome: Outcome | None) -> None:
        assert outcome is not None
        statuses[outcome.status] += 1

    with workplace.serve() as server:
        num_free = server.metric("aotgaudi_kv_blocks_free")
        scale, seconds = send_weighed(server, short_orders(Random(seed), number), take)
        drift_bytes = scale.drift_bytes(after_tenths=1)
        record(
            f"short soak: {number} requests in {seconds:.0f} s (seed {seed}), {number / seconds:.0f} a second, "
            f"{dict(statuses)}, {drift_bytes / 1e6:+.1f} MB since the first tenth ({scale.course()})"
        )

        assert statuses == {200: number}
        assert {name: server.metric(name) for name in MUST_BE_ZERO} == dict.fromkeys(MUST_BE_ZERO, 0.0)
        assert eventually(server.is_idle)
        assert server.metric("aotgaudi_kv_blocks_free") == num_free
        assert drift_bytes <= MAX_SHORT_DRIFT_BYTES
        assert "Traceback" not in server.log
