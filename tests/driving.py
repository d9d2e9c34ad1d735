"""Requests that are served to their end by the scheduler alone, without a device: what tests of coverage drive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import resolve_max_tokens
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduled, Scheduler
from aotgaudi.engine.steps import DecodeRow, PromptRow, Step
from aotgaudi.entries import PromptEntry
from aotgaudi.errors import RequestError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy

_FEW_BLOCKS = st.integers(2, 14)


@st.composite
def serving_limits(
    draw: st.DrawFn,
    *,
    most_seqs: int = 5,
    most_per_block: int = 4,
    most_tokens: int = 20,
    most_len: int = 24,
    num_blocks: st.SearchStrategy[int] = _FEW_BLOCKS,
) -> ServingLimits:
    """Limits up to these. A prompt's step has room for a block at least."""
    block_size = draw(st.integers(1, most_per_block))
    max_num_seqs = draw(st.integers(1, most_seqs))
    return ServingLimits(
        max_num_seqs=max_num_seqs,
        max_num_prefill_seqs=draw(st.integers(1, max_num_seqs)),
        max_num_batched_tokens=draw(st.integers(block_size, most_tokens)),
        max_model_len=draw(st.integers(2, most_len)),
        block_size=block_size,
        num_blocks=draw(num_blocks),
    )


def request_of(
    prompt: Sequence[int],
    max_tokens: int = 20,
    params: SamplingParams = SamplingParams(),  # noqa: B008 - a frozen value
    *,
    name: str = "r",
    **fields: Any,
) -> Request:
    """A request that waits, with seed 0 unless `fields` say otherwise."""
    values = {"request_id": name, "prompt_token_ids": prompt, "seed": 0, **fields}
    return Request(params=params, max_tokens=max_tokens, **values)


asked_tokens = st.lists(
    st.tuples(st.integers(1, 23), st.one_of(st.none(), st.integers(1, 23))), min_size=1, max_size=6
)


def served(
    limits: ServingLimits,
    table: BucketTable,
    asked: Sequence[tuple[int, int | None]],
    policy: Policy,
    prefix_caching: bool,
) -> Iterator[Step]:
    """Yields the steps in which all that is admitted is served to its end. Decode steps take as long as 4 tokens."""
    pool = BlockPool(limits.num_blocks)
    scheduler = Scheduler(limits, table, pool, policy=policy, prefix_caching=prefix_caching)
    for index, (num_prompt_tokens, max_tokens) in enumerate(asked):
        params = SamplingParams(max_tokens=max_tokens)
        try:
            resolved = resolve_max_tokens(num_prompt_tokens, params, limits)
        except RequestError:
            continue
        scheduler.add(request_of((1,) * num_prompt_tokens, resolved, params, name=f"r{index}"))
    while (scheduled := scheduler.schedule()) is not None:
        yield scheduled.step
        entry = scheduled.step.entry
        scheduler.observe(entry, entry.query_len if isinstance(entry, PromptEntry) else 4.0)
        scheduler.complete(scheduled, [None if row.sampling is None else 2 for row in scheduled.step.rows])
    assert not scheduler.has_work


def step_once(scheduler: Scheduler, token_id: int = 7) -> Scheduled:
    """Schedules a step and completes it: every row that samples gets `token_id`."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    rows: tuple[PromptRow | DecodeRow, ...] = scheduled.step.rows
    scheduler.complete(scheduled, [None if row.sampling is None else token_id for row in rows])
    scheduler.check_integrity()
    return scheduled
