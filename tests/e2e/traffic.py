"""Requests by the hundred, many at a time, some of them left: what they are, sending them, and what came of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.harness import events_of

PROBES: tuple[Mapping[str, Any], ...] = (
    {"prompt": "the quick brown fox", "max_tokens": 24, "temperature": 0},
    {"prompt": [9] * 33, "max_tokens": 20, "temperature": 1, "seed": 7},
    {"prompt": "seven wizards", "max_tokens": 30, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 1},
    {"prompt": list(range(1, 17)), "max_tokens": 40, "temperature": 1.3, "seed": -5, "ignore_eos": True},
    {"prompt": "a jar", "max_tokens": 24, "temperature": 0.9, "top_k": 50, "seed": 3, "stop": ["44", "q"]},
)
"""Repeatable requests, asked again and again among the others."""


@dataclass(frozen=True)
class Outcome:
    """What came of an order: status, the text of each choice, the finish reasons, and the JSON that had them."""

    status: int
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    events: Sequence[Mapping[str, Any]] = field(default=(), compare=False)


@dataclass(frozen=True)
class Order:
    """One request of the traffic.

    `probe` is its number among `PROBES`, `leave_after` the number of lines of a stream after which its client goes,
    `status` what the answer must have, `is_right` what else must be true of an answer with it. Without `has_key`, the
    client sends no API key.
    """

    path: str
    body: Mapping[str, Any]
    probe: int | None = None
    leave_after: int | None = None
    status: int = 200
    is_right: Callable[[Outcome], bool] | None = None
    has_key: bool = True

    def is_met_by(self, outcome: Outcome) -> bool:
        """Returns whether `outcome` is what was asked for."""
        return outcome.status == self.status and (self.is_right is None or self.is_right(outcome))


Take = Callable[[Order, "Outcome | None"], None]
"""Gets each order with its outcome, as they come; None for one whose client has left."""


async def send_all(
    base_url: str, orders: Iterable[Order], num_connections: int, take: Take, api_key: str = "none"
) -> None:
    """Sends all orders, `num_connections` at a time."""
    waiting, key = iter(orders), {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, timeout=120) as client:

        async def work() -> None:
            for order in waiting:
                take(order, await send(client, order, key if order.has_key else {}))

        await asyncio.gather(*(work() for _ in range(num_connections)))


async def send(client: httpx.AsyncClient, order: Order, headers: Mapping[str, str]) -> Outcome | None:
    """Sends one order. Returns what came of it, or None where its client has left."""
    async with client.stream("POST", order.path, json=dict(order.body), headers=dict(headers)) as response:
        if not order.body.get("stream") or response.status_code != 200:
            return outcome_of(response.status_code, [json.loads(await response.aread())])
        lines: list[str] = []
        async for line in response.aiter_lines():
            if order.leave_after is not None and len(lines) >= order.leave_after:
                return None
            lines.append(line)
        return outcome_of(response.status_code, [*events_of(iter(lines))])


def outcome_of(status: int, events: Sequence[Mapping[str, Any]]) -> Outcome:
    """Puts the pieces of each choice together, whether whole or in chunks, of a completion or a chat."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        index = choice["index"]
        message = choice.get("message") or choice.get("delta") or {}
        texts[index] = texts.get(index, "") + (choice.get("text") or message.get("content") or "")
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    indices = sorted(texts)
    return Outcome(status, tuple(texts[i] for i in indices), tuple(reasons[i] for i in indices), events)
