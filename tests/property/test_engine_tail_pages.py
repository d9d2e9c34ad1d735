"""The machine of `test_engine_batching`, with far fewer tail pages than blocks: few hits are as long as their blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.cache_rows import fewest_tail_pages
from aotgaudi.spec.defrag import DefragSpec
from aotgaudi.spec.limits import ServingLimits
from tests.property.test_engine_batching import EOS, CacheRunner, SharedEngine, make_client

REACH = 3


def engine(prefix_caching: bool = True, spare: int = 0) -> tuple[EngineCore, ServingLimits]:
    """An engine of 48 blocks and 7 pages, or a few more. No one waits for pages: `CacheRunner` checks what is read."""
    limits = ServingLimits(
        max_num_seqs=2,
        max_num_batched_tokens=2,
        max_model_len=24,
        block_size=2,
        num_blocks=48,
    )
    num_pages = fewest_tail_pages(limits, REACH) + spare
    limits = limits.model_copy(update={"num_tail_pages": num_pages})
    runner = CacheRunner(limits, tail_reach=REACH)
    scheduler = Scheduler(
        limits,
        BucketTable((PromptEntry(1, 2, 12),), (DecodeEntry(2, 1, 48),)),
        BlockPool(limits.num_blocks),
        eos_token_ids=(EOS,),
        prefix_caching=prefix_caching,
        tail_reach=REACH,
    )
    defrag = DefragSpec(threshold=1, padded_swaps=(1, 2))
    return EngineCore(scheduler, runner, defrag=defrag, clock=lambda: runner.now), limits


class FewPages(SharedEngine):
    """Clients that share long beginnings come and go."""

    @initialize(prefix_caching=st.booleans(), spare=st.integers(0, 3))
    def start(self, prefix_caching: bool, spare: int) -> None:  # type: ignore[override]
        self.core, self.limits = engine(prefix_caching, spare)
        self.runner = self.core._runner  # type: ignore[assignment]
        self.clients = []

    @rule(length=st.integers(1, 20), last=st.integers(0, 2), max_tokens=st.integers(1, 3))
    def arrive_alike(self, length: int, last: int, max_tokens: int) -> None:
        prompt = (*range(10, 10 + length), last)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.clients.append(make_client(f"r{len(self.clients)}", prompt, params, 0, self.limits))
        self.core.add(self.clients[-1].stream)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "core"):
            tails = self.core.scheduler.tails
            assert tails is not None
            assert self.core.scheduler.prefixes is not None or tails.num_kept == 0


FewPages.TestCase.settings = settings(deadline=None, stateful_step_count=25)
TestFewPages = FewPages.TestCase


@pytest.mark.parametrize(("others", "num_hit"), [(0, 20), (1, 0)])
def test_a_hit_ends_where_pages_are_left_and_what_is_computed_again_is_found_again(
    others: int, num_hit: int
) -> None:
    core, limits = engine()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def serve(name: str, first: int) -> int:
        client = make_client(name, tuple(range(first, first + 21)), params, 0, limits)
        core.add(client.stream)
        while core.step():
            core.scheduler.check_integrity()
        client.check()
        return client.request.num_cached_tokens

    assert serve("first", 5) == 0
    for i in range(others):
        assert serve(f"other-{i}", 30) == 0

    assert serve("again", 5) == num_hit
    assert serve("once-more", 5) == 20


def test_pages_of_invalid_values_are_named_for_clearing() -> None:
    core, limits = engine()
    scheduler = core.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    client = make_client("r", tuple(range(5, 12)), params, 0, limits)
    core.add(client.stream)
    for _ in range(4):
        core.step()
    table = tuple(client.request.block_table)
    assert scheduler.tails is not None
    pages = [page for page in scheduler.tails.of(table) if page]

    blocks, cleared = scheduler.discard(client.request)

    assert (blocks, sorted(cleared)) == (table, sorted(pages))
    assert scheduler.tails.num_held == 0
    scheduler.check_integrity()
